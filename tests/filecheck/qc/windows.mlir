// CHECK: qc.windows %x {kernel = array<i64: 3, 2>, strides = array<i64: 2, 1>, padding = array<i64: 1, 0, 1, 1>, dilation = array<i64: 1, 2>} : tensor<1x5x8x24xf32>
%x = "test.op"() : () -> tensor<1x9x9x4xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 2>, strides = array<i64: 2, 1>, padding = array<i64: 1, 0, 1, 1>, dilation = array<i64: 1, 2>} : tensor<1x5x8x24xf32>
// CHECK: qc.windows %q {kernel = array<i64: 3, 2>, strides = array<i64: 2, 1>, padding = array<i64: 1, 0, 1, 1>, dilation = array<i64: 1, 2>, channels = 4} : tensor<1x5x8x96xi8>
%q = "test.op"() : () -> tensor<1x9x9x96xi8>
%1 = qc.windows %q {kernel = array<i64: 3, 2>, strides = array<i64: 2, 1>, padding = array<i64: 1, 0, 1, 1>, dilation = array<i64: 1, 2>, channels = 4} : tensor<1x5x8x96xi8>

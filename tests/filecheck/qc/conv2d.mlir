// CHECK: qc.conv2d %x, %w bias(%b) {strides = array<i64: 2, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 2} : tensor<1x8x5x9xf32>
%x, %w, %b = "test.op"() : () -> (tensor<1x4x9x9xf32>, tensor<8x2x3x3xf32>, tensor<8xf32>)
%0 = qc.conv2d %x, %w bias(%b) {strides = array<i64: 2, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 2} : tensor<1x8x5x9xf32>

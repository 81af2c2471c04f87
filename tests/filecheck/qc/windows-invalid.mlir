// CHECK: x and the result need rank 4, not 3 and 4
%x = "test.op"() : () -> tensor<9x9x4xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>} : tensor<1x7x7x36xf32>

// -----

// CHECK: kernel needs 2 positive entries
%x = "test.op"() : () -> tensor<1x9x9x4xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 0>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>} : tensor<1x7x7x36xf32>

// -----

// CHECK: strides and dilation need 2 entries
%x = "test.op"() : () -> tensor<1x9x9x4xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>} : tensor<1x7x7x36xf32>

// -----

// CHECK: padding must not be negative
%x = "test.op"() : () -> tensor<1x9x9x4xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, -1, 0, 0>, dilation = array<i64: 1, 1>} : tensor<1x7x7x36xf32>

// -----

// CHECK: the number of channels 'c' must be fixed
%x = "test.op"() : () -> tensor<1x9x9x?xf32, #qc.dims<[1, 9, 9, "c"]>>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>} : tensor<1x7x7x36xf32>

// -----

// CHECK: the result must have shape (1, 7, 7, 36), not (1, 7, 7, 32)
%x = "test.op"() : () -> tensor<1x9x9x4xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>} : tensor<1x7x7x32xf32>

// -----

// CHECK: element types differ
%x = "test.op"() : () -> tensor<1x9x9x4xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>} : tensor<1x7x7x36xbf16>

// -----

// CHECK: x must have shape (1, 9, 9, 96), not (1, 9, 9, 80)
%x = "test.op"() : () -> tensor<1x9x9x80xi8>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>, channels = 4} : tensor<1x7x7x96xi8>

// -----

// CHECK: the result must have shape (1, 7, 7, 96), not (1, 7, 7, 36)
%x = "test.op"() : () -> tensor<1x9x9x96xi8>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>, channels = 4} : tensor<1x7x7x36xi8>

// -----

// CHECK: int8 rows hold i8, of some channels
%x = "test.op"() : () -> tensor<1x9x9x96xf32>
%0 = qc.windows %x {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>, channels = 4} : tensor<1x7x7x96xf32>

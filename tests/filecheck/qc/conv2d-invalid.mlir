// CHECK: x and w need rank 4, not 3 and 4
%x, %w = "test.op"() : () -> (tensor<4x9x9xf32>, tensor<8x2x3x3xf32>)
%0 = qc.conv2d %x, %w {strides = array<i64: 2, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 2} : tensor<1x8x5x9xf32>

// -----

// CHECK: padding needs 4 entries
%x, %w = "test.op"() : () -> (tensor<1x4x9x9xf32>, tensor<8x2x3x3xf32>)
%0 = qc.conv2d %x, %w {strides = array<i64: 2, 1>, padding = array<i64: 1, 1>, dilation = array<i64: 1, 1>, groups = 2} : tensor<1x8x5x9xf32>

// -----

// CHECK: strides and dilation must be positive
%x, %w = "test.op"() : () -> (tensor<1x4x9x9xf32>, tensor<8x2x3x3xf32>)
%0 = qc.conv2d %x, %w {strides = array<i64: 0, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 2} : tensor<1x8x5x9xf32>

// -----

// CHECK: 8 output channels are not a multiple of 3 groups
%x, %w = "test.op"() : () -> (tensor<1x4x9x9xf32>, tensor<8x2x3x3xf32>)
%0 = qc.conv2d %x, %w {strides = array<i64: 2, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 3} : tensor<1x8x5x9xf32>

// -----

// CHECK: x has 4 channels but w and groups want 2
%x, %w = "test.op"() : () -> (tensor<1x4x9x9xf32>, tensor<8x2x3x3xf32>)
%0 = qc.conv2d %x, %w {strides = array<i64: 2, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 1} : tensor<1x8x5x9xf32>

// -----

// CHECK: the result must have shape (1, 8, 5, 9)
%x, %w = "test.op"() : () -> (tensor<1x4x9x9xf32>, tensor<8x2x3x3xf32>)
%0 = qc.conv2d %x, %w {strides = array<i64: 2, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 2} : tensor<1x8x4x9xf32>

// -----

// CHECK: bias must have shape (8,)
%x, %w, %b = "test.op"() : () -> (tensor<1x4x9x9xf32>, tensor<8x2x3x3xf32>, tensor<9xf32>)
%0 = qc.conv2d %x, %w bias(%b) {strides = array<i64: 2, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 2} : tensor<1x8x5x9xf32>

// CHECK: x and cos need rank 4
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.rope %x, %x, %x : tensor<3x8xf32>

// -----

// CHECK: sin must have shape
%x, %c, %s = "test.op"() : () -> (tensor<1x2x3x8xf32>, tensor<1x1x3x8xf32>, tensor<1x1x4x8xf32>)
%0 = qc.rope %x, %c, %s : tensor<1x2x3x8xf32>

// -----

// CHECK: does not fit x of shape
%x, %c = "test.op"() : () -> (tensor<1x2x3x8xf32>, tensor<1x1x4x8xf32>)
%0 = qc.rope %x, %c, %c : tensor<1x2x3x8xf32>

// -----

// CHECK: the head dim 7 must be even
%x, %c = "test.op"() : () -> (tensor<1x2x3x7xf32>, tensor<1x1x3x7xf32>)
%0 = qc.rope %x, %c, %c : tensor<1x2x3x7xf32>

// -----

// CHECK: the result must have shape
%x, %c = "test.op"() : () -> (tensor<1x2x3x8xf32>, tensor<1x1x3x8xf32>)
%0 = qc.rope %x, %c, %c : tensor<1x3x2x8xf32>

// CHECK: input and result differ in shape
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.layer_norm %x {eps = 1.0e-5} : tensor<8x3xf32>

// -----

// CHECK: weight and bias must have shape (8,)
%x, %w = "test.op"() : () -> (tensor<3x8xf32>, tensor<3xf32>)
%0 = qc.layer_norm %x weight(%w) {eps = 1.0e-5} : tensor<3x8xf32>

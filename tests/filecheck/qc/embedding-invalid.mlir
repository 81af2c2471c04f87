// CHECK: the result must have shape (3, 8)
%i, %w = "test.op"() : () -> (tensor<3xi64>, tensor<9x8xf32>)
%0 = qc.embedding %i, %w : tensor<3x9xf32>

// -----

// CHECK: ids must be i32 or i64
%i, %w = "test.op"() : () -> (tensor<3xf32>, tensor<9x8xf32>)
%0 = qc.embedding %i, %w : tensor<3x8xf32>

// CHECK: ranks 2 and 3 must be equal
%a, %b = "test.op"() : () -> (tensor<3x8xf32>, tensor<2x8x5xf32>)
%0 = qc.batch_matmul %a, %b : tensor<2x3x5xf32>

// -----

// CHECK: batch dims (2,) and (3,) differ
%a, %b = "test.op"() : () -> (tensor<2x3x8xf32>, tensor<3x8x5xf32>)
%0 = qc.batch_matmul %a, %b : tensor<2x3x5xf32>

// -----

// CHECK: a has K = 7 but b has K = 8
%a, %b = "test.op"() : () -> (tensor<3x7xf32>, tensor<8x5xf32>)
%0 = qc.batch_matmul %a, %b : tensor<3x5xf32>

// -----

// CHECK: the result must have shape (3, 5)
%a, %b = "test.op"() : () -> (tensor<3x8xf32>, tensor<8x5xf32>)
%0 = qc.batch_matmul %a, %b : tensor<5x3xf32>

// CHECK: k = 9 does not fit an axis of size 8
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.topk %x {k = 9, axis = 1} : tensor<3x9xf32>, tensor<3x9xi64>

// -----

// CHECK: indices must have shape (3, 2)
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.topk %x {k = 2, axis = 1} : tensor<3x2xf32>, tensor<3x8xi64>

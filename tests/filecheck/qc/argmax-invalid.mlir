// CHECK: axis 2 is out of range
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.argmax %x {axis = 2} : tensor<3xi64>

// -----

// CHECK: the result must have shape (3,)
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.argmax %x {axis = 1} : tensor<3x8xi64>

// -----

// CHECK: the result must be i64
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.argmax %x {axis = 1} : tensor<3xi32>

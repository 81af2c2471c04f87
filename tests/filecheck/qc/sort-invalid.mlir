// CHECK: axis 2 is out of range
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.sort %x {axis = 2, descending = true} : tensor<3x8xf32>, tensor<3x8xi64>

// -----

// CHECK: indices must be i64
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.sort %x {axis = 1, descending = true} : tensor<3x8xf32>, tensor<3x8xi32>

// -----

// CHECK: values must have shape (3, 8)
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.sort %x {axis = 1, descending = true} : tensor<3x7xf32>, tensor<3x8xi64>

// -----

// CHECK: values and x differ in element type
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.sort %x {axis = 1, descending = true} : tensor<3x8xf16>, tensor<3x8xi64>

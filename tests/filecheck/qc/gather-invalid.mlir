// CHECK: mode must be "take" or "along"
%x, %i = "test.op"() : () -> (tensor<3x5xf32>, tensor<2xi64>)
%0 = qc.gather %x, %i {axis = 1, mode = "pick"} : tensor<3x2xf32>

// -----

// CHECK: axis 2 is out of range
%x, %i = "test.op"() : () -> (tensor<3x5xf32>, tensor<2xi64>)
%0 = qc.gather %x, %i {axis = 2, mode = "take"} : tensor<3x2xf32>

// -----

// CHECK: the result must have shape (3, 2)
%x, %i = "test.op"() : () -> (tensor<3x5xf32>, tensor<2xi64>)
%0 = qc.gather %x, %i {axis = 1, mode = "take"} : tensor<2x5xf32>

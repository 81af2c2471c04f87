%x, %i = "test.op"() : () -> (tensor<3x5xf32>, tensor<?xi64, #qc.dims<["s"]>>)
// CHECK: qc.gather %x, %i {axis = 1, mode = "take"} : tensor<3x?xf32, #qc.dims<[3, "s"]>>
%0 = qc.gather %x, %i {axis = 1, mode = "take"} : tensor<3x?xf32, #qc.dims<[3, "s"]>>

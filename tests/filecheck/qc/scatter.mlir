// CHECK: qc.scatter %x, %i, %s {axis = 0, reduce = "add"} : tensor<4x6xf32>
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<3x6xi64>, tensor<3x6xf32>)
%0 = qc.scatter %x, %i, %s {axis = 0, reduce = "add"} : tensor<4x6xf32>
// CHECK: qc.scatter %x, %i, %s {axis = 0, reduce = "max"} : tensor<4x6xf32>
%1 = qc.scatter %x, %i, %s {axis = 0, reduce = "max"} : tensor<4x6xf32>

// CHECK: qc.index_update %x, %i, %s {axis = 1} : tensor<2x5x3xf32>
%x, %i, %s = "test.op"() : () -> (tensor<2x5x3xf32>, tensor<2xi64>, tensor<2x2x3xf32>)
%0 = qc.index_update %x, %i, %s {axis = 1} : tensor<2x5x3xf32>

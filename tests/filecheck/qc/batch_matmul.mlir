%a, %b = "test.op"() : () -> (tensor<?x3x8xf32, #qc.dims<["b", 3, 8]>>, tensor<?x8x5xf32, #qc.dims<["b", 8, 5]>>)
// CHECK: qc.batch_matmul %a, %b : tensor<?x3x5xf32, #qc.dims<["b", 3, 5]>>
%0 = qc.batch_matmul %a, %b : tensor<?x3x5xf32, #qc.dims<["b", 3, 5]>>

%x = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK: qc.topk %x {k = 2, axis = 1} : tensor<?x2xf32, #qc.dims<["s", 2]>>, tensor<?x2xi64, #qc.dims<["s", 2]>>
%0, %1 = qc.topk %x {k = 2, axis = 1} : tensor<?x2xf32, #qc.dims<["s", 2]>>, tensor<?x2xi64, #qc.dims<["s", 2]>>

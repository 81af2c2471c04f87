%x = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK: qc.sort %x {axis = 1, descending = true} : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xi64, #qc.dims<["s", 8]>>
%0, %1 = qc.sort %x {axis = 1, descending = true} : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xi64, #qc.dims<["s", 8]>>

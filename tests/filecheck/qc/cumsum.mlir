%x = "test.op"() : () -> tensor<?x8xi1, #qc.dims<["s", 8]>>
// CHECK: qc.cumsum %x {axis = 0} : tensor<?x8xi64, #qc.dims<["s", 8]>>
%0 = qc.cumsum %x {axis = 0} : tensor<?x8xi64, #qc.dims<["s", 8]>>
// CHECK: qc.cumsum %x {axis = 1, reduce = "max"} : tensor<?x8xi1, #qc.dims<["s", 8]>>
%1 = qc.cumsum %x {axis = 1, reduce = "max"} : tensor<?x8xi1, #qc.dims<["s", 8]>>

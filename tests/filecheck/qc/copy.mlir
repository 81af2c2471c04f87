%0 = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK: qc.copy %0 {source = "cpu", target = "sim:0"} : tensor<?x8xf32, #qc.dims<["s", 8]>>
%1 = qc.copy %0 {source = "cpu", target = "sim:0"} : tensor<?x8xf32, #qc.dims<["s", 8]>>

%x = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK: qc.argmax %x {axis = 1} : tensor<?xi64, #qc.dims<["s"]>>
%0 = qc.argmax %x {axis = 1} : tensor<?xi64, #qc.dims<["s"]>>

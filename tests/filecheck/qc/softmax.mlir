%x = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK: qc.softmax %x {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
%0 = qc.softmax %x {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>

%x = "test.op"() : () -> tensor<?x3x96xbf16, #qc.dims<["s", 3, 96]>>
// CHECK: qc.hadamard %x {block = 32} : tensor<?x3x96xbf16, #qc.dims<["s", 3, 96]>>
%0 = qc.hadamard %x {block = 32} : tensor<?x3x96xbf16, #qc.dims<["s", 3, 96]>>

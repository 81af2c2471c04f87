// RUN: qc opt %s | filecheck %s

%x = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK: qc.route %x {k = 2, scores = "all", normalise} : tensor<?x2xf32, #qc.dims<["s", 2]>>, tensor<?x2xi64, #qc.dims<["s", 2]>>
%0, %1 = qc.route %x {k = 2, scores = "all", normalise} : tensor<?x2xf32, #qc.dims<["s", 2]>>, tensor<?x2xi64, #qc.dims<["s", 2]>>
// CHECK: qc.route %x {k = 8, scores = "chosen"} : tensor<?x8xbf16, #qc.dims<["s", 8]>>, tensor<?x8xi64, #qc.dims<["s", 8]>>
%2, %3 = qc.route %x {k = 8, scores = "chosen"} : tensor<?x8xbf16, #qc.dims<["s", 8]>>, tensor<?x8xi64, #qc.dims<["s", 8]>>

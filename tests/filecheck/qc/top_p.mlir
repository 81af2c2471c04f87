// RUN: qc opt %s | filecheck %s

%x, %top, %draw = "test.op"() : () -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?xf32, #qc.dims<["s"]>>, tensor<?xf32, #qc.dims<["s"]>>)
// CHECK: qc.top_p %x, %top, %draw : tensor<?xi64, #qc.dims<["s"]>>
%0 = qc.top_p %x, %top, %draw : tensor<?xi64, #qc.dims<["s"]>>

// RUN: qc opt %s | filecheck %s

%x, %w, %o = "test.op"() : () -> (tensor<?x8xbf16, #qc.dims<["s", 8]>>, tensor<3x5x8xbf16>, tensor<4xi32>)
// CHECK: qc.grouped_linear %x, %w, %o : tensor<?x5xbf16, #qc.dims<["s", 5]>>
%0 = qc.grouped_linear %x, %w, %o : tensor<?x5xbf16, #qc.dims<["s", 5]>>

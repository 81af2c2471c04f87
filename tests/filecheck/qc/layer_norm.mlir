%x, %w, %b = "test.op"() : () -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>, tensor<8xf32>)
// CHECK: qc.layer_norm %x weight(%w) bias(%b) {eps = 1.000000e-12} : tensor<?x8xf32, #qc.dims<["s", 8]>>
%0 = qc.layer_norm %x weight(%w) bias(%b) {eps = 1.0e-12} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT: qc.layer_norm %x bias(%b) {eps = 1.000000e-05} : tensor<?x8xf32, #qc.dims<["s", 8]>>
%1 = qc.layer_norm %x bias(%b) {eps = 1.0e-5} : tensor<?x8xf32, #qc.dims<["s", 8]>>

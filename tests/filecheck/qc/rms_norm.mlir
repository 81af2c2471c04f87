%x, %w = "test.op"() : () -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>)
// CHECK: qc.rms_norm %x weight(%w) {eps = 1.000000e-06} : tensor<?x8xf32, #qc.dims<["s", 8]>>
%0 = qc.rms_norm %x weight(%w) {eps = 1.0e-6} : tensor<?x8xf32, #qc.dims<["s", 8]>>

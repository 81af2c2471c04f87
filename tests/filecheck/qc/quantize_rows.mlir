%x, %m = "test.op"() : () -> (tensor<?x3x100xbf16, #qc.dims<["s", 3, 100]>>, tensor<1x1x100xi1>)
// CHECK: qc.quantize_rows %x {kind = "token", value = 0.000000e+00} : tensor<?x3x160xi8, #qc.dims<["s", 3, 160]>>
%0 = qc.quantize_rows %x {kind = "token", value = 0.0} : tensor<?x3x160xi8, #qc.dims<["s", 3, 160]>>
// CHECK: qc.quantize_rows %x columns(%m) {kind = "outliers", value = 6.000000e+00} : tensor<?x3x160xi8, #qc.dims<["s", 3, 160]>>
%1 = qc.quantize_rows %x columns(%m) {kind = "outliers", value = 6.0} : tensor<?x3x160xi8, #qc.dims<["s", 3, 160]>>
%l = "test.op"() : () -> tensor<?xf32, #qc.dims<["s"]>>
// CHECK: qc.quantize_rows %x largest(%l) {kind = "image", value = 0.000000e+00} : tensor<?x3x160xi8, #qc.dims<["s", 3, 160]>>
%2 = qc.quantize_rows %x largest(%l) {kind = "image", value = 0.0} : tensor<?x3x160xi8, #qc.dims<["s", 3, 160]>>

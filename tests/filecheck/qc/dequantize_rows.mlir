%q = "test.op"() : () -> tensor<?x96xi8, #qc.dims<["s", 96]>>
// CHECK: qc.dequantize_rows %q : tensor<?x50xf16, #qc.dims<["s", 50]>>
%0 = qc.dequantize_rows %q : tensor<?x50xf16, #qc.dims<["s", 50]>>

// CHECK: rows must have shape (4, 96), not (4, 64)
%q = "test.op"() : () -> tensor<4x64xi8>
%0 = qc.dequantize_rows %q : tensor<4x64xf32>

// -----

// CHECK: rows hold i8
%q = "test.op"() : () -> tensor<4x96xf32>
%0 = qc.dequantize_rows %q : tensor<4x64xf32>

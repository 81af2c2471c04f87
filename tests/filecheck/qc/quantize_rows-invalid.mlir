// CHECK: the result must have shape (4, 96), not (4, 64)
%x = "test.op"() : () -> tensor<4x64xf32>
%0 = qc.quantize_rows %x {kind = "token", value = 0.0} : tensor<4x64xi8>

// -----

// CHECK: kind is one of token, tensor, outliers
%x = "test.op"() : () -> tensor<4x64xf32>
%0 = qc.quantize_rows %x {kind = "row", value = 0.0} : tensor<4x96xi8>

// -----

// CHECK: kind 'outliers', and no other, takes columns
%x = "test.op"() : () -> tensor<4x64xf32>
%0 = qc.quantize_rows %x {kind = "outliers", value = 6.0} : tensor<4x96xi8>

// -----

// CHECK: columns are i1 of shape (1, 64), not (64,)
%x, %m = "test.op"() : () -> (tensor<4x64xf32>, tensor<64xi1>)
%0 = qc.quantize_rows %x columns(%m) {kind = "outliers", value = 6.0} : tensor<4x96xi8>

// -----

// CHECK: the result holds i8
%x = "test.op"() : () -> tensor<4x64xf32>
%0 = qc.quantize_rows %x {kind = "token", value = 0.0} : tensor<4x96xui8>

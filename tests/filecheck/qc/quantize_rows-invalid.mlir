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

// -----

// CHECK: kind 'image', and no other, has `largest`
%x = "test.op"() : () -> tensor<2x4x64xf32>
%0 = qc.quantize_rows %x {kind = "image", value = 0.0} : tensor<2x4x96xi8>

// -----

// CHECK: kind 'image', and no other, has `largest`
%x, %l = "test.op"() : () -> (tensor<2x4x64xf32>, tensor<2xf32>)
%0 = qc.quantize_rows %x largest(%l) {kind = "token", value = 0.0} : tensor<2x4x96xi8>

// -----

// CHECK: `largest` is f32 of shape (2,), not f32 of (4,)
%x, %l = "test.op"() : () -> (tensor<2x4x64xf32>, tensor<4xf32>)
%0 = qc.quantize_rows %x largest(%l) {kind = "image", value = 0.0} : tensor<2x4x96xi8>

// -----

// CHECK: `largest` is f32 of shape (2,), not bf16 of (2,)
%x, %l = "test.op"() : () -> (tensor<2x4x64xf32>, tensor<2xbf16>)
%0 = qc.quantize_rows %x largest(%l) {kind = "image", value = 0.0} : tensor<2x4x96xi8>

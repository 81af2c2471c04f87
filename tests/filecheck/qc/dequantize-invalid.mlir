// CHECK: input and result differ in shape
%0 = "test.op"() : () -> !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
%1 = qc.dequantize %0 : tensor<64x4xf32>

// -----

// CHECK: element types differ
%0 = "test.op"() : () -> !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
%1 = qc.dequantize %0 : tensor<4x64xbf16>

// CHECK: the input must have shape (4, 64)
%0 = "test.op"() : () -> tensor<4x32xf32>
%1 = qc.quantize %0 : !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>

// -----

// CHECK: element types differ
%0 = "test.op"() : () -> tensor<4x64xbf16>
%1 = qc.quantize %0 : !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>

// -----

// CHECK: the input needs rank 2
%0 = "test.op"() : () -> tensor<2x4x64xf32>
%1 = qc.quantize %0 : !qc.qtensor<2x4x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>

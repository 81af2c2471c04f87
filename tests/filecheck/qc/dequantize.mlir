%0 = "test.op"() : () -> !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
// CHECK: qc.dequantize %0 : tensor<4x64xf32>
%1 = qc.dequantize %0 : tensor<4x64xf32>

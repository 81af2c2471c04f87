%0 = "test.op"() : () -> tensor<4x64xf32>
// CHECK: qc.quantize %0 : !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
%1 = qc.quantize %0 : !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>

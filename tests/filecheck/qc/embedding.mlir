%i, %w = "test.op"() : () -> (tensor<?x?xi64, #qc.dims<["b", "s"]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>)
// CHECK: qc.embedding %i, %w : tensor<?x?x64xf32, #qc.dims<["b", "s", 64]>>
%0 = qc.embedding %i, %w : tensor<?x?x64xf32, #qc.dims<["b", "s", 64]>>

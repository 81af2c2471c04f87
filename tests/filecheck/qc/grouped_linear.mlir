%x, %w, %i = "test.op"() : () -> (tensor<?x8xbf16, #qc.dims<["s", 8]>>, tensor<15x8xbf16>, tensor<?xi64, #qc.dims<["2*s"]>>)
// CHECK: qc.grouped_linear %x, %w, %i {experts = 3, repeat = 2} : tensor<?x5xbf16, #qc.dims<["2*s", 5]>>
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 2} : tensor<?x5xbf16, #qc.dims<["2*s", 5]>>

%y, %q, %j = "test.op"() : () -> (tensor<7x64xf32>, !qc.qtensor<12x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<7xi32>)
// CHECK: qc.grouped_linear %y, %q, %j {experts = 4, repeat = 1} : tensor<7x3xf32>
%1 = qc.grouped_linear %y, %q, %j {experts = 4, repeat = 1} : tensor<7x3xf32>

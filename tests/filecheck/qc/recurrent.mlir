%x, %w, %h, %b, %c = "test.op"() : () -> (tensor<?x?x20xf32, #qc.dims<["s", "b", 20]>>, !qc.qtensor<20x5xf32, #qc.format<"int8", {group = "row", symmetric = true, scale = "f32"}>, #qc.layout<"canonical">>, tensor<?x5xf32, #qc.dims<["b", 5]>>, tensor<20xf32>, tensor<?x5xf32, #qc.dims<["b", 5]>>)
// CHECK: qc.recurrent %x, %w, %h bias(%b) cell_start(%c) {kind = "lstm", reverse} : tensor<?x?x5xf32, #qc.dims<["s", "b", 5]>>, tensor<?x5xf32, #qc.dims<["b", 5]>>
%0, %1 = qc.recurrent %x, %w, %h bias(%b) cell_start(%c) {kind = "lstm", reverse} : tensor<?x?x5xf32, #qc.dims<["s", "b", 5]>>, tensor<?x5xf32, #qc.dims<["b", 5]>>

%y, %u, %p, %g, %d = "test.op"() : () -> (tensor<7x2x20xbf16>, tensor<20x3xbf16>, tensor<3x5xbf16>, tensor<2x3xbf16>, tensor<2x5xbf16>)
// CHECK: qc.recurrent %y, %u, %g projection(%p) cell_start(%d) {kind = "lstm"} : tensor<7x2x3xbf16>, tensor<2x5xbf16>, tensor<2x5xf32>
%2, %3, %4 = qc.recurrent %y, %u, %g projection(%p) cell_start(%d) {kind = "lstm"} : tensor<7x2x3xbf16>, tensor<2x5xbf16>, tensor<2x5xf32>

%z, %v, %k = "test.op"() : () -> (tensor<7x2x15xf32>, tensor<15x5xf32>, tensor<2x5xf32>)
// CHECK: qc.recurrent %z, %v, %k {kind = "gru"} : tensor<7x2x5xf32>
%5 = qc.recurrent %z, %v, %k {kind = "gru"} : tensor<7x2x5xf32>

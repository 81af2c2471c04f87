%x, %c = "test.op"() : () -> (tensor<?x2x?x8xf32, #qc.dims<["b", 2, "s", 8]>>, tensor<1x1x?x8xf32, #qc.dims<[1, 1, "s", 8]>>)
// CHECK: qc.rope %x, %c, %c : tensor<?x2x?x8xf32, #qc.dims<["b", 2, "s", 8]>>
%0 = qc.rope %x, %c, %c : tensor<?x2x?x8xf32, #qc.dims<["b", 2, "s", 8]>>
// CHECK-NEXT: qc.rope %x, %c, %c {interleaved} : tensor<?x2x?x8xf32, #qc.dims<["b", 2, "s", 8]>>
%1 = qc.rope %x, %c, %c {interleaved} : tensor<?x2x?x8xf32, #qc.dims<["b", 2, "s", 8]>>

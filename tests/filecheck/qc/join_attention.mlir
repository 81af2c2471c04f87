%parts, %more = "test.op"() : () -> (tensor<?x4x1x3x10xf32, #qc.dims<["b", 4, 1, 3, 10]>>, tensor<2x4x3x1x66xf32>)
// CHECK: qc.join_attention %parts : tensor<?x4x1x8xbf16, #qc.dims<["b", 4, 1, 8]>>
%0 = qc.join_attention %parts : tensor<?x4x1x8xbf16, #qc.dims<["b", 4, 1, 8]>>
// CHECK-NEXT: qc.join_attention %more : tensor<2x4x3x64xf32>
%1 = qc.join_attention %more : tensor<2x4x3x64xf32>

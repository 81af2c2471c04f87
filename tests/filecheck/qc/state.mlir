// CHECK: qc.state @kv.0 : tensor<2x8xbf16>
%0 = qc.state @kv.0 : tensor<2x8xbf16>

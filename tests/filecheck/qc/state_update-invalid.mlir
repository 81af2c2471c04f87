// CHECK: should be of base attribute tensor
%0 = qc.const @w : !qc.qtensor<2x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
qc.state_update @kv %0

// CHECK: a constant is a tensor of static shape
%0 = qc.const @w : tensor<?xf32, #qc.dims<["s"]>>

// -----

// CHECK: a constant is a tensor of static shape
%0 = qc.const @w : f32

// -----

// CHECK: needs a static shape
%0 = qc.const @w : !qc.qtensor<?x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>

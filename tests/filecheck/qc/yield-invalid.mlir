// CHECK: the epilogue yields ['f64'], expected ['f32']
%x, %w, %b = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<4xf32>)
%0 = qc.linear %x, %w : tensor<?x4xf32, #qc.dims<["s", 4]>> {
^bb0(%acc: f32):
  %1 = arith.extf %acc : f32 to f64
  qc.yield %1
}

// -----

// CHECK: the epilogue yields [], expected ['f32']
%x, %w, %b = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<4xf32>)
%0 = qc.linear %x, %w : tensor<?x4xf32, #qc.dims<["s", 4]>> {
^bb0(%acc: f32):
  qc.yield
}

%x, %w = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>)
%0 = qc.linear %x, %w : tensor<?x4xf32, #qc.dims<["s", 4]>> {
^bb0(%acc: f32):
  // CHECK: qc.yield %{{.*}}
  qc.yield %acc
}

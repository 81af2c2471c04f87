// CHECK: rt.device @cpu {kind = "cpu", index = 0 : i64}
rt.device @cpu {kind = "cpu", index = 0 : i64}

// CHECK: rt.device @gpu {kind = "cuda", index = 1 : i64}
rt.device @gpu {kind = "cuda", index = 1 : i64}

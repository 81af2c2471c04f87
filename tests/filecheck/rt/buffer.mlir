// CHECK: rt.buffer @b0 {arena = @act, nbytes = 256 : i64}
rt.buffer @b0 {arena = @act, nbytes = 256 : i64}

// CHECK: rt.buffer @b1 {arena = @act, offset = 64 : i64, nbytes = 256 : i64}
rt.buffer @b1 {arena = @act, offset = 64 : i64, nbytes = 256 : i64}

// CHECK: rt.buffer @w {arena = @weights, offset = 0 : i64, nbytes = 256 : i64, weight = "encoder.0.weight"}
rt.buffer @w {arena = @weights, offset = 0 : i64, nbytes = 256 : i64, weight = "encoder.0.weight"}

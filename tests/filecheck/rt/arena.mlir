// CHECK: rt.arena @act {device = @gpu, kind = "activations", nbytes = 4096 : i64, entry = "main"}
rt.arena @act {device = @gpu, kind = "activations", nbytes = 4096 : i64, entry = "main"}

// CHECK: rt.arena @weights {device = @gpu, kind = "constants", nbytes = 0 : i64}
rt.arena @weights {device = @gpu, kind = "constants", nbytes = 0 : i64}

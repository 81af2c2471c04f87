// RUN: qc opt -p plan-memory %s | filecheck %s

rt.device @host {kind = "cpu", index = 0 : i64}
rt.device @gpu {kind = "cuda", index = 0 : i64}
rt.stream @copy on @gpu
rt.stream @compute on @gpu
rt.event @e0
rt.event @e1
rt.arena @in {device = @host, kind = "input", nbytes = 0 : i64, entry = "main"}
rt.arena @out {device = @host, kind = "output", nbytes = 0 : i64, entry = "main"}
rt.arena @act {device = @gpu, kind = "activations", nbytes = 0 : i64, entry = "main"}
rt.buffer @x {arena = @in, nbytes = 1024 : i64}
rt.buffer @y {arena = @out, nbytes = 1024 : i64}
rt.buffer @a {arena = @act, nbytes = 1024 : i64}
rt.buffer @b {arena = @act, nbytes = 1000 : i64}
rt.buffer @c {arena = @act, nbytes = 1024 : i64}
rt.kernel @exp attributes {symbols = ["s"], operands = [#rt.operand<"x", f32, "r", ["s"], [1]>, #rt.operand<"out", f32, "w", ["s"], [1]>]}
rt.entry @main attributes {symbols = [#rt.symbol<"s", 1, 250>], inputs = [#rt.sig<"x", @in, f32, ["s"]>], outputs = [#rt.sig<"y", @out, f32, ["s"]>]} {
  rt.copy on @copy from <@x, f32, ["s"], [1], 0> to <@a, f32, ["s"], [1], 0>
  rt.record @e0 on @copy
  rt.wait @e0 on @compute
  rt.launch @exp on @compute [#rt.view<@a, f32, ["s"], [1], 0>, #rt.view<@b, f32, ["s"], [1], 0>]
  rt.launch @exp on @compute [#rt.view<@b, f32, ["s"], [1], 0>, #rt.view<@c, f32, ["s"], [1], 0>]
  rt.record @e1 on @compute
  rt.wait @e1 on @copy
  rt.copy on @copy from <@c, f32, ["s"], [1], 0> to <@y, f32, ["s"], [1], 0>
}

// @a is dead when @c begins, and the compute stream orders the two.
// CHECK: rt.arena @in {{.*}} nbytes = 1024
// CHECK: rt.arena @out {{.*}} nbytes = 1024
// CHECK: rt.arena @act {{.*}} nbytes = 2024
// CHECK: rt.buffer @x {{.*}} offset = 0 : i64
// CHECK: rt.buffer @y {{.*}} offset = 0 : i64
// CHECK: rt.buffer @a {{.*}} offset = 0 : i64
// CHECK: rt.buffer @b {{.*}} offset = 1024 : i64
// CHECK: rt.buffer @c {{.*}} offset = 0 : i64

// RUN: qc opt -p assign-streams %s | filecheck %s

rt.device @gpu {kind = "cuda", index = 0 : i64}
rt.arena @in {device = @gpu, kind = "input", nbytes = 0 : i64, entry = "main"}
rt.arena @out {device = @gpu, kind = "output", nbytes = 0 : i64, entry = "main"}
rt.arena @act {device = @gpu, kind = "activations", nbytes = 0 : i64, entry = "main"}
rt.buffer @x {arena = @in, nbytes = 1000 : i64}
rt.buffer @y {arena = @out, nbytes = 1000 : i64}
rt.buffer @h {arena = @act, nbytes = 1000 : i64}
rt.buffer @a {arena = @act, nbytes = 1000 : i64}
rt.buffer @b {arena = @act, nbytes = 1000 : i64}
rt.buffer @c {arena = @act, nbytes = 1000 : i64}
rt.buffer @d {arena = @act, nbytes = 1000 : i64}
rt.buffer @p {arena = @act, nbytes = 1000 : i64}
rt.buffer @q {arena = @act, nbytes = 1000 : i64}
rt.buffer @r {arena = @act, nbytes = 1000 : i64}
rt.buffer @s {arena = @act, nbytes = 1000 : i64}
rt.kernel @exp attributes {symbols = ["s"], operands = [#rt.operand<"x", f32, "r", ["s"], [1]>, #rt.operand<"out", f32, "w", ["s"], [1]>]}
rt.kernel @add attributes {symbols = ["s"], operands = [#rt.operand<"x", f32, "r", ["s"], [1]>, #rt.operand<"y", f32, "r", ["s"], [1]>, #rt.operand<"out", f32, "w", ["s"], [1]>]}
rt.entry @main attributes {symbols = [#rt.symbol<"s", 1, 250>], inputs = [#rt.sig<"x", @in, f32, ["s"]>], outputs = [#rt.sig<"y", @out, f32, ["s"]>]} {
  rt.launch @exp [#rt.view<@x, f32, ["s"], [1], 0>, #rt.view<@h, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@h, f32, ["s"], [1], 0>, #rt.view<@a, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@a, f32, ["s"], [1], 0>, #rt.view<@b, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@b, f32, ["s"], [1], 0>, #rt.view<@c, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@c, f32, ["s"], [1], 0>, #rt.view<@d, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@h, f32, ["s"], [1], 0>, #rt.view<@p, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@p, f32, ["s"], [1], 0>, #rt.view<@q, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@q, f32, ["s"], [1], 0>, #rt.view<@r, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@r, f32, ["s"], [1], 0>, #rt.view<@s, f32, ["s"], [1], 0>]
  rt.launch @add [#rt.view<@d, f32, ["s"], [1], 0>, #rt.view<@s, f32, ["s"], [1], 0>, #rt.view<@y, f32, ["s"], [1], 0>]
}

// CHECK:      rt.stream @gpu.compute on @gpu
// CHECK-NEXT: rt.stream @gpu.compute1 on @gpu
// CHECK-NEXT: rt.event @e0
// CHECK-NEXT: rt.event @e1
// CHECK:      rt.entry @main
// CHECK-NEXT: rt.launch @exp on @gpu.compute [#rt.view<@x
// CHECK-NEXT: rt.record @e0 on @gpu.compute
// CHECK-NEXT: rt.launch @exp on @gpu.compute [#rt.view<@h
// CHECK-NEXT: rt.launch @exp on @gpu.compute [#rt.view<@a
// CHECK-NEXT: rt.launch @exp on @gpu.compute [#rt.view<@b
// CHECK-NEXT: rt.launch @exp on @gpu.compute [#rt.view<@c
// CHECK-NEXT: rt.record @e1 on @gpu.compute
// CHECK-NEXT: rt.wait @e0 on @gpu.compute1
// CHECK-NEXT: rt.launch @exp on @gpu.compute1 [#rt.view<@h
// CHECK-NEXT: rt.launch @exp on @gpu.compute1 [#rt.view<@p
// CHECK-NEXT: rt.launch @exp on @gpu.compute1 [#rt.view<@q
// CHECK-NEXT: rt.launch @exp on @gpu.compute1 [#rt.view<@r
// CHECK-NEXT: rt.wait @e1 on @gpu.compute1
// CHECK-NEXT: rt.launch @add on @gpu.compute1 [#rt.view<@d

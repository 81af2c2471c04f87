// RUN: qc opt -p assign-streams %s | filecheck %s

rt.device @host {kind = "cpu", index = 0 : i64}
rt.device @gpu {kind = "cuda", index = 0 : i64}
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
  rt.copy from <@x, f32, ["s"], [1], 0> to <@a, f32, ["s"], [1], 0>
  rt.launch @exp [#rt.view<@a, f32, ["s"], [1], 0>, #rt.view<@b, f32, ["s"], [1], 0>]
  rt.launch @exp [#rt.view<@b, f32, ["s"], [1], 0>, #rt.view<@c, f32, ["s"], [1], 0>]
  rt.copy from <@c, f32, ["s"], [1], 0> to <@y, f32, ["s"], [1], 0>
}

// CHECK:      rt.device @gpu
// CHECK-NEXT: rt.stream @gpu.compute on @gpu
// CHECK-NEXT: rt.stream @gpu.copy on @gpu
// CHECK-NEXT: rt.event @e0
// CHECK-NEXT: rt.event @e1
// CHECK:      rt.entry @main
// CHECK-NEXT: rt.copy on @gpu.copy from <@x
// CHECK-NEXT: rt.record @e0 on @gpu.copy
// CHECK-NEXT: rt.wait @e0 on @gpu.compute
// CHECK-NEXT: rt.launch @exp on @gpu.compute [#rt.view<@a
// CHECK-NEXT: rt.launch @exp on @gpu.compute [#rt.view<@b
// CHECK-NEXT: rt.record @e1 on @gpu.compute
// CHECK-NEXT: rt.wait @e1 on @gpu.copy
// CHECK-NEXT: rt.copy on @gpu.copy from <@c

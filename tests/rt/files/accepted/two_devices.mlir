// accepted. Layer 1 on cuda:0, layer 2 on cuda:1. The activation crosses by a peer copy on cuda:1's copy stream, which
// also brings the result home. Each hand-over is one record and one wait.
builtin.module {
  rt.device @host {kind = "cpu", index = 0 : i64}
  rt.device @gpu0 {kind = "cuda", index = 0 : i64}
  rt.device @gpu1 {kind = "cuda", index = 1 : i64}
  rt.stream @compute0 on @gpu0
  rt.stream @compute1 on @gpu1
  rt.stream @copy1 on @gpu1
  rt.event @layer1
  rt.event @crossed
  rt.event @layer2
  rt.arena @in {device = @host, kind = "input", nbytes = 4096 : i64, entry = "main"}
  rt.arena @out {device = @host, kind = "output", nbytes = 4096 : i64, entry = "main"}
  rt.arena @act0 {device = @gpu0, kind = "activations", nbytes = 8192 : i64, entry = "main"}
  rt.arena @act1 {device = @gpu1, kind = "activations", nbytes = 8192 : i64, entry = "main"}
  rt.arena @weights0 {device = @gpu0, kind = "constants", nbytes = 2560 : i64}
  rt.arena @weights1 {device = @gpu1, kind = "constants", nbytes = 2560 : i64}
  rt.buffer @x {arena = @in, offset = 0 : i64, nbytes = 4096 : i64}
  rt.buffer @y {arena = @out, offset = 0 : i64, nbytes = 4096 : i64}
  rt.buffer @x0 {arena = @act0, offset = 0 : i64, nbytes = 4096 : i64}
  rt.buffer @h0 {arena = @act0, offset = 4096 : i64, nbytes = 4096 : i64}
  rt.buffer @h1 {arena = @act1, offset = 0 : i64, nbytes = 4096 : i64}
  rt.buffer @y1 {arena = @act1, offset = 4096 : i64, nbytes = 4096 : i64}
  rt.buffer @w0 {arena = @weights0, offset = 0 : i64, nbytes = 1024 : i64, weight = "layer1.weight"}
  rt.buffer @w1 {arena = @weights1, offset = 1536 : i64, nbytes = 1024 : i64, weight = "layer2.weight"}
  rt.kernel @linear attributes {symbols = ["s"], operands = [
    #rt.operand<"x", f32, "r", ["s", 16], [16, 1]>,
    #rt.operand<"w", f32, "r", [16, 16], [16, 1]>,
    #rt.operand<"out", f32, "w", ["s", 16], [16, 1]>], serves = "layer1"}
  rt.entry @main attributes {
    symbols = [#rt.symbol<"s", 1, 64>],
    inputs = [#rt.sig<"x", @in, f32, ["s", 16], "torch.float32">],
    outputs = [#rt.sig<"y", @out, f32, ["s", 16], "torch.float32">]
  } {
    rt.copy on @compute0 from <@x, f32, ["s", 16], [16, 1], 0> to <@x0, f32, ["s", 16], [16, 1], 0>
    rt.launch @linear on @compute0 [#rt.view<@x0, f32, ["s", 16], [16, 1], 0>, #rt.view<@w0, f32, [16, 16], [16, 1], 0>, #rt.view<@h0, f32, ["s", 16], [16, 1], 0>]
    rt.record @layer1 on @compute0
    rt.wait @layer1 on @copy1
    rt.copy on @copy1 from <@h0, f32, ["s", 16], [16, 1], 0> to <@h1, f32, ["s", 16], [16, 1], 0>
    rt.record @crossed on @copy1
    rt.wait @crossed on @compute1
    rt.launch @linear on @compute1 [#rt.view<@h1, f32, ["s", 16], [16, 1], 0>, #rt.view<@w1, f32, [16, 16], [16, 1], 0>, #rt.view<@y1, f32, ["s", 16], [16, 1], 0>]
    rt.record @layer2 on @compute1
    rt.wait @layer2 on @copy1
    rt.copy on @copy1 from <@y1, f32, ["s", 16], [16, 1], 0> to <@y, f32, ["s", 16], [16, 1], 0>
  }
}

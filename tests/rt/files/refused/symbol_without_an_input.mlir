// refused: unbound-symbol
// message: entry 'main': no input has a dimension that would give the symbol 'b' its value
// base: two_streams.mlir
// edit: a symbol that no input binds
builtin.module {
  rt.device @host {kind = "cpu", index = 0 : i64}
  rt.device @gpu {kind = "cuda", index = 0 : i64}
  rt.stream @compute on @gpu
  rt.stream @copy on @gpu
  rt.event @first
  rt.event @second
  rt.event @done
  rt.arena @x {device = @host, kind = "input", nbytes = 8192 : i64, entry = "main"}
  rt.arena @y {device = @host, kind = "output", nbytes = 8192 : i64, entry = "main"}
  rt.arena @act {device = @gpu, kind = "activations", nbytes = 16384 : i64, entry = "main"}
  rt.arena @weights {device = @gpu, kind = "constants", nbytes = 4096 : i64}
  rt.buffer @x {arena = @x, offset = 0 : i64, nbytes = 8192 : i64}
  rt.buffer @y {arena = @y, offset = 0 : i64, nbytes = 8192 : i64}
  rt.buffer @a {arena = @act, offset = 0 : i64, nbytes = 8192 : i64}
  rt.buffer @b {arena = @act, offset = 8192 : i64, nbytes = 8192 : i64}
  rt.buffer @w {arena = @weights, offset = 0 : i64, nbytes = 128 : i64, weight = "scale"}
  rt.kernel @half attributes {symbols = ["s"], operands = [
    #rt.operand<"x", f32, "r", ["s", 32], [32, 1]>,
    #rt.operand<"scale", f32, "r", [32], [1]>,
    #rt.operand<"out", f32, "w", ["s", 32], [32, 1]>], serves = "y = x * scale"}
  rt.entry @main attributes {
    symbols = [#rt.symbol<"s", 1, 32>, #rt.symbol<"b", 1, 2>],
    inputs = [#rt.sig<"x", @x, f32, [2, "s", 32], "torch.float32">],
    outputs = [#rt.sig<"y", @y, f32, [2, "s", 32], "torch.float32">]
  } {
    rt.copy on @copy from <@x, f32, ["s", 32], [32, 1], 0> to <@a, f32, ["s", 32], [32, 1], 0>
    rt.record @first on @copy
    rt.copy on @copy from <@x, f32, ["s", 32], [32, 1], "32*s"> to <@a, f32, ["s", 32], [32, 1], "32*s">
    rt.record @second on @copy
    rt.wait @first on @compute
    rt.launch @half on @compute [#rt.view<@a, f32, ["s", 32], [32, 1], 0>, #rt.view<@w, f32, [32], [1], 0>, #rt.view<@b, f32, ["s", 32], [32, 1], 0>]
    rt.wait @second on @compute
    rt.launch @half on @compute [#rt.view<@a, f32, ["s", 32], [32, 1], "32*s">, #rt.view<@w, f32, [32], [1], 0>, #rt.view<@b, f32, ["s", 32], [32, 1], "32*s">]
    rt.record @done on @compute
    rt.wait @done on @copy
    rt.copy on @copy from <@b, f32, [2, "s", 32], ["32*s", 32, 1], 0> to <@y, f32, [2, "s", 32], ["32*s", 32, 1], 0>
  }
}

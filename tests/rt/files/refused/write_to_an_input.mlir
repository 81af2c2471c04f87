// refused: write-input
// message: entry 'main', step 1 (launch of 'add' on stream 's0'): it writes buffer 'x' of the input arena 'in', which is read-only here
// base: residual.mlir
// edit: the addition writes the caller's argument
builtin.module {
  rt.device @gpu {kind = "sim", index = 0 : i64}
  rt.stream @s0 on @gpu
  rt.arena @in {device = @gpu, kind = "input", nbytes = 2048 : i64, entry = "main"}
  rt.arena @out {device = @gpu, kind = "output", nbytes = 2048 : i64, entry = "main"}
  rt.arena @act {device = @gpu, kind = "activations", nbytes = 8192 : i64, entry = "main"}
  rt.buffer @x {arena = @in, offset = 0 : i64, nbytes = 2048 : i64}
  rt.buffer @y {arena = @out, offset = 0 : i64, nbytes = 2048 : i64}
  rt.buffer @a {arena = @act, offset = 0 : i64, nbytes = 2048 : i64}
  rt.buffer @c {arena = @act, offset = 2048 : i64, nbytes = 2048 : i64}
  rt.kernel @relu attributes {symbols = ["s"], operands = [
    #rt.operand<"x", f32, "r", ["s", 16], [16, 1]>, #rt.operand<"out", f32, "w", ["s", 16], [16, 1]>]}
  rt.kernel @add attributes {symbols = ["s"], operands = [
    #rt.operand<"a", f32, "r", ["s", 16], [16, 1]>, #rt.operand<"b", f32, "r", ["s", 16], [16, 1]>,
    #rt.operand<"out", f32, "w", ["s", 16], [16, 1]>]}
  rt.entry @main attributes {
    symbols = [#rt.symbol<"s", 1, 32>],
    inputs = [#rt.sig<"x", @in, f32, ["s", 16], "torch.float32">],
    outputs = [#rt.sig<"y", @out, f32, ["s", 16], "torch.float32">]
  } {
    rt.launch @relu on @s0 [#rt.view<@x, f32, ["s", 16], [16, 1], 0>, #rt.view<@a, f32, ["s", 16], [16, 1], 0>]
    rt.launch @add on @s0 [#rt.view<@a, f32, ["s", 16], [16, 1], 0>, #rt.view<@x, f32, ["s", 16], [16, 1], 0>, #rt.view<@x, f32, ["s", 16], [16, 1], 0>]
    rt.launch @relu on @s0 [#rt.view<@c, f32, ["s", 16], [16, 1], 0>, #rt.view<@y, f32, ["s", 16], [16, 1], 0>]
  }
}

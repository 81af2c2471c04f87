// refused: buffer-outside-arena
// message: buffer 'r1' ends at byte 3072 of arena 'act', which has 2560
// base: shared_memory.mlir
// edit: the arena is too small for @r1
builtin.module {
  rt.device @gpu {kind = "cuda", index = 0 : i64}
  rt.stream @left on @gpu
  rt.stream @right on @gpu
  rt.event @left_done
  rt.event @right_done
  rt.arena @in {device = @gpu, kind = "input", nbytes = 1024 : i64, entry = "main"}
  rt.arena @out {device = @gpu, kind = "output", nbytes = 1024 : i64, entry = "main"}
  rt.arena @act {device = @gpu, kind = "activations", nbytes = 2560 : i64, entry = "main"}
  rt.buffer @x {arena = @in, offset = 0 : i64, nbytes = 1024 : i64}
  rt.buffer @y {arena = @out, offset = 0 : i64, nbytes = 1024 : i64}
  rt.buffer @l1 {arena = @act, offset = 0 : i64, nbytes = 1024 : i64}
  rt.buffer @l2 {arena = @act, offset = 1024 : i64, nbytes = 1024 : i64}
  rt.buffer @r1 {arena = @act, offset = 2048 : i64, nbytes = 1024 : i64}
  rt.buffer @r2 {arena = @act, offset = 0 : i64, nbytes = 1024 : i64}
  rt.kernel @exp attributes {symbols = [], operands = [
    #rt.operand<"x", f32, "r", [256], [1]>, #rt.operand<"out", f32, "w", [256], [1]>]}
  rt.kernel @add attributes {symbols = [], operands = [
    #rt.operand<"a", f32, "r", [256], [1]>, #rt.operand<"b", f32, "r", [256], [1]>, #rt.operand<"out", f32, "w", [256], [1]>]}
  rt.entry @main attributes {
    symbols = [],
    inputs = [#rt.sig<"x", @in, f32, [256], "torch.float32">],
    outputs = [#rt.sig<"y", @out, f32, [256], "torch.float32">]
  } {
    rt.launch @exp on @left [#rt.view<@x, f32, [256], [1], 0>, #rt.view<@l1, f32, [256], [1], 0>]
    rt.launch @exp on @right [#rt.view<@x, f32, [256], [1], 0>, #rt.view<@r1, f32, [256], [1], 0>]
    rt.launch @exp on @left [#rt.view<@l1, f32, [256], [1], 0>, #rt.view<@l2, f32, [256], [1], 0>]
    rt.record @left_done on @left
    rt.wait @left_done on @right
    rt.launch @exp on @right [#rt.view<@r1, f32, [256], [1], 0>, #rt.view<@r2, f32, [256], [1], 0>]
    rt.record @right_done on @right
    rt.wait @right_done on @left
    rt.launch @add on @left [#rt.view<@l2, f32, [256], [1], 0>, #rt.view<@r2, f32, [256], [1], 0>, #rt.view<@y, f32, [256], [1], 0>]
  }
}

// refused: buffer-overlap
// message: the buffers 'y' and 'z' overlap in arena 'out' (output), whose contents stay
// base: ring.mlir
// edit: a second buffer over the output
builtin.module {
  rt.device @host {kind = "cpu", index = 0 : i64}
  rt.device @gpu {kind = "cuda", index = 0 : i64}
  rt.stream @compute on @gpu
  rt.stream @copy on @gpu
  rt.event @full0
  rt.event @full1
  rt.event @full2
  rt.event @free0
  rt.event @done
  rt.arena @in {device = @host, kind = "input", nbytes = 3072 : i64, entry = "main"}
  rt.arena @out {device = @host, kind = "output", nbytes = 1024 : i64, entry = "main"}
  rt.arena @act {device = @gpu, kind = "activations", nbytes = 3072 : i64, entry = "main"}
  rt.buffer @x {arena = @in, offset = 0 : i64, nbytes = 3072 : i64}
  rt.buffer @y {arena = @out, offset = 0 : i64, nbytes = 1024 : i64}
  rt.buffer @z {arena = @out, offset = 512 : i64, nbytes = 512 : i64}
  rt.buffer @slot0 {arena = @act, offset = 0 : i64, nbytes = 1024 : i64}
  rt.buffer @slot1 {arena = @act, offset = 1024 : i64, nbytes = 1024 : i64}
  rt.buffer @sum {arena = @act, offset = 2048 : i64, nbytes = 1024 : i64}
  rt.kernel @start attributes {symbols = [], operands = [
    #rt.operand<"x", f32, "r", [256], [1]>, #rt.operand<"sum", f32, "w", [256], [1]>]}
  rt.kernel @add attributes {symbols = [], operands = [
    #rt.operand<"x", f32, "r", [256], [1]>, #rt.operand<"sum", f32, "rw", [256], [1]>]}
  rt.entry @main attributes {
    symbols = [],
    inputs = [#rt.sig<"x", @in, f32, [3, 256], "torch.float32">],
    outputs = [#rt.sig<"y", @out, f32, [256], "torch.float32">]
  } {
    rt.copy on @copy from <@x, f32, [256], [1], 0> to <@slot0, f32, [256], [1], 0>
    rt.record @full0 on @copy
    rt.copy on @copy from <@x, f32, [256], [1], 256> to <@slot1, f32, [256], [1], 0>
    rt.record @full1 on @copy
    rt.wait @full0 on @compute
    rt.launch @start on @compute [#rt.view<@slot0, f32, [256], [1], 0>, #rt.view<@sum, f32, [256], [1], 0>]
    rt.record @free0 on @compute
    rt.wait @free0 on @copy
    rt.copy on @copy from <@x, f32, [256], [1], 512> to <@slot0, f32, [256], [1], 0>
    rt.record @full2 on @copy
    rt.wait @full1 on @compute
    rt.launch @add on @compute [#rt.view<@slot1, f32, [256], [1], 0>, #rt.view<@sum, f32, [256], [1], 0>]
    rt.wait @full2 on @compute
    rt.launch @add on @compute [#rt.view<@slot0, f32, [256], [1], 0>, #rt.view<@sum, f32, [256], [1], 0>]
    rt.record @done on @compute
    rt.wait @done on @copy
    rt.copy on @copy from <@sum, f32, [256], [1], 0> to <@y, f32, [256], [1], 0>
  }
}

// refused: select-unreachable
// message: entry 'decode', step 0 (select of 'linear_1', 'linear_large', 'linear_1' on stream 's0'): the case of 'linear_large' can never be taken
// base: decode_step.mlir
// edit: the second case ends where the first does
builtin.module {
  rt.device @cpu {kind = "cpu", index = 0 : i64}
  rt.stream @s0 on @cpu
  rt.arena @weights {device = @cpu, kind = "constants", nbytes = 4608 : i64}
  rt.arena @tables {device = @cpu, kind = "init", nbytes = 256 : i64}
  rt.arena @cache {device = @cpu, kind = "state", nbytes = 8192 : i64}
  rt.arena @in.x {device = @cpu, kind = "input", nbytes = 2048 : i64, entry = "decode"}
  rt.arena @in.position {device = @cpu, kind = "input", nbytes = 64 : i64, entry = "decode"}
  rt.arena @out {device = @cpu, kind = "output", nbytes = 2048 : i64, entry = "decode"}
  rt.arena @act {device = @cpu, kind = "activations", nbytes = 2048 : i64, entry = "decode"}
  rt.buffer @w {arena = @weights, offset = 256 : i64, nbytes = 4352 : i64, weight = "proj.weight"}
  rt.buffer @rope {arena = @tables, offset = 0 : i64, nbytes = 256 : i64}
  rt.buffer @kv {arena = @cache, offset = 0 : i64, nbytes = 8192 : i64}
  rt.buffer @x {arena = @in.x, offset = 0 : i64, nbytes = 2048 : i64}
  rt.buffer @position {arena = @in.position, offset = 0 : i64, nbytes = 64 : i64}
  rt.buffer @y {arena = @out, offset = 0 : i64, nbytes = 2048 : i64}
  rt.buffer @h {arena = @act, offset = 0 : i64, nbytes = 2048 : i64}
  rt.kernel @table attributes {symbols = [], operands = [#rt.operand<"out", f32, "w", [64], [1]>]}
  rt.kernel @linear_1 attributes {symbols = ["b"], operands = [
    #rt.operand<"x", f32, "r", ["b", 64], [64, 1]>,
    #rt.operand<"w", f32, "r", [64, 64], [], #qc.format<"int8", {}>, #qc.layout<"canonical">>,
    #rt.operand<"out", f32, "w", ["b", 64], [64, 1]>]}
  rt.kernel @linear_large attributes {symbols = ["b"], operands = [
    #rt.operand<"x", f32, "r", ["b", 64], [64, 1]>,
    #rt.operand<"w", f32, "r", [64, 64], [], #qc.format<"int8", {}>, #qc.layout<"canonical">>,
    #rt.operand<"out", f32, "w", ["b", 64], [64, 1]>]}
  rt.kernel @rotate attributes {symbols = ["b"], operands = [
    #rt.operand<"x", f32, "r", ["b", 64], [64, 1]>,
    #rt.operand<"table", f32, "r", [64], [1]>,
    #rt.operand<"out", f32, "w", ["b", 64], [64, 1]>]}
  rt.kernel @update attributes {symbols = ["b"], operands = [
    #rt.operand<"x", f32, "rw", [1, 32, 64], [2048, 64, 1]>,
    #rt.operand<"index", i64, "r", ["b"], [1]>,
    #rt.operand<"src", f32, "r", [1, "b", 64], ["64*b", 64, 1]>]}
  rt.kernel @read attributes {symbols = ["b"], operands = [
    #rt.operand<"x", f32, "r", [32, 64], [64, 1]>,
    #rt.operand<"q", f32, "r", ["b", 64], [64, 1]>,
    #rt.operand<"out", f32, "w", ["b", 64], [64, 1]>]}
  rt.entry @init attributes {symbols = [], inputs = [], outputs = [], init} {
    rt.launch @table on @s0 [#rt.view<@rope, f32, [64], [1], 0>]
  }
  rt.entry @decode attributes {
    symbols = [#rt.symbol<"b", 1, 8>],
    inputs = [#rt.sig<"x", @in.x, f32, ["b", 64], "torch.float32">, #rt.sig<"position", @in.position, i64, ["b"], "torch.int64">],
    outputs = [#rt.sig<"y", @out, f32, ["b", 64], "torch.float32">]
  } {
    rt.select "b" [#rt.case<@linear_1, 1>, #rt.case<@linear_large, 1>, #rt.case<@linear_1>] on @s0 [#rt.view<@x, f32, ["b", 64], [64, 1], 0>, #rt.view<@w, f32, [64, 64], [], 0, #qc.format<"int8", {}>, #qc.layout<"canonical">>, #rt.view<@h, f32, ["b", 64], [64, 1], 0>]
    rt.launch @rotate on @s0 [#rt.view<@h, f32, ["b", 64], [64, 1], 0>, #rt.view<@rope, f32, [64], [1], 0>, #rt.view<@h, f32, ["b", 64], [64, 1], 0>]
    rt.launch @update on @s0 [#rt.view<@kv, f32, [1, 32, 64], [2048, 64, 1], 0>, #rt.view<@position, i64, ["b"], [1], 0>, #rt.view<@h, f32, [1, "b", 64], ["64*b", 64, 1], 0>]
    rt.launch @read on @s0 [#rt.view<@kv, f32, [32, 64], [64, 1], 0>, #rt.view<@h, f32, ["b", 64], [64, 1], 0>, #rt.view<@y, f32, ["b", 64], [64, 1], 0>]
  }
}

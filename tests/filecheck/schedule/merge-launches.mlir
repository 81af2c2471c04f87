// RUN: qc opt -p merge-launches %s | filecheck %s

// One token: the loop of k is computed in its row, and the loop of q and the row of v stand beside it. The update by a
// list of two and the loop that reads what the first launch writes stay. A copy back into what the loop reads stays, too.

rt.device @cpu {kind = "cpu", index = 0 : i64}
rt.arena @in {device = @cpu, kind = "input", nbytes = 0 : i64, entry = "main"}
rt.arena @at {device = @cpu, kind = "input", nbytes = 0 : i64, entry = "main"}
rt.arena @two {device = @cpu, kind = "input", nbytes = 0 : i64, entry = "main"}
rt.arena @out {device = @cpu, kind = "output", nbytes = 0 : i64, entry = "main"}
rt.arena @act {device = @cpu, kind = "activations", nbytes = 0 : i64, entry = "main"}
rt.arena @state.k {device = @cpu, kind = "state", nbytes = 0 : i64}
rt.arena @state.v {device = @cpu, kind = "state", nbytes = 0 : i64}
rt.buffer @x {arena = @in, nbytes = 24 : i64}
rt.buffer @i {arena = @at, nbytes = 8 : i64}
rt.buffer @ij {arena = @two, nbytes = 16 : i64}
rt.buffer @y {arena = @out, nbytes = 24 : i64}
rt.buffer @q {arena = @act, nbytes = 24 : i64}
rt.buffer @kk {arena = @act, nbytes = 24 : i64}
rt.buffer @pair {arena = @act, nbytes = 48 : i64}
rt.buffer @t {arena = @act, nbytes = 24 : i64}
rt.buffer @k {arena = @state.k, nbytes = 120 : i64}
rt.buffer @v {arena = @state.v, nbytes = 120 : i64}
rt.kernel @neg attributes {symbols = [], operands = [#rt.operand<"in0", f32, "r", [2, 3], [3, 1]>, #rt.operand<"out0", f32, "w", [2, 3], [3, 1]>]} {
^bb0(%0: tensor<2x3xf32>, %1: tensor<2x3xf32>):
  %2 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<2x3xf32>) outs(%1 : tensor<2x3xf32>) {
  ^bb1(%3: f32, %4: f32):
    %5 = arith.negf %3 : f32
    linalg.yield %5 : f32
  } -> tensor<2x3xf32>
  rt.yield %2 : tensor<2x3xf32>
}
rt.kernel @copy attributes {symbols = [], operands = [#rt.operand<"in0", f32, "r", [2, 3], [3, 1]>, #rt.operand<"out0", f32, "w", [2, 3], [3, 1]>]} {
^bb0(%0: tensor<2x3xf32>, %1: tensor<2x3xf32>):
  %2 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<2x3xf32>) outs(%1 : tensor<2x3xf32>) {
  ^bb1(%3: f32, %4: f32):
    linalg.yield %3 : f32
  } -> tensor<2x3xf32>
  rt.yield %2 : tensor<2x3xf32>
}
rt.kernel @row attributes {symbols = [], operands = [#rt.operand<"x", f32, "rw", [2, 5, 3], [15, 3, 1]>, #rt.operand<"index", i64, "r", [1], [1]>, #rt.operand<"src", f32, "r", [2, 1, 3], [3, 3, 1]>]} {
^bb0(%0: tensor<2x5x3xf32>, %1: tensor<1xi64>, %2: tensor<2x1x3xf32>):
  %3 = qc.index_update %0, %1, %2 {axis = 1} : tensor<2x5x3xf32>
  rt.yield %3 : tensor<2x5x3xf32>
}
rt.kernel @rows attributes {symbols = [], operands = [#rt.operand<"x", f32, "rw", [2, 5, 3], [15, 3, 1]>, #rt.operand<"index", i64, "r", [2], [1]>, #rt.operand<"src", f32, "r", [2, 2, 3], [6, 3, 1]>]} {
^bb0(%0: tensor<2x5x3xf32>, %1: tensor<2xi64>, %2: tensor<2x2x3xf32>):
  %3 = qc.index_update %0, %1, %2 {axis = 1} : tensor<2x5x3xf32>
  rt.yield %3 : tensor<2x5x3xf32>
}
rt.entry @main attributes {symbols = [], inputs = [#rt.sig<"x", @in, f32, [2, 3]>, #rt.sig<"i", @at, i64, [1]>, #rt.sig<"ij", @two, i64, [2]>], outputs = [#rt.sig<"y", @out, f32, [2, 3]>]} {
  rt.launch @neg [#rt.view<@x, f32, [2, 3], [3, 1], 0>, #rt.view<@q, f32, [2, 3], [3, 1], 0>]
  rt.launch @neg [#rt.view<@x, f32, [2, 3], [3, 1], 0>, #rt.view<@kk, f32, [2, 3], [3, 1], 0>]
  rt.launch @row [#rt.view<@k, f32, [2, 5, 3], [15, 3, 1], 0>, #rt.view<@i, i64, [1], [1], 0>, #rt.view<@kk, f32, [2, 1, 3], [3, 3, 1], 0>]
  rt.launch @row [#rt.view<@v, f32, [2, 5, 3], [15, 3, 1], 0>, #rt.view<@i, i64, [1], [1], 0>, #rt.view<@x, f32, [2, 1, 3], [3, 3, 1], 0>]
  rt.launch @rows [#rt.view<@k, f32, [2, 5, 3], [15, 3, 1], 0>, #rt.view<@ij, i64, [2], [1], 0>, #rt.view<@v, f32, [2, 2, 3], [15, 3, 1], 0>]
  rt.launch @neg [#rt.view<@q, f32, [2, 3], [3, 1], 0>, #rt.view<@t, f32, [2, 3], [3, 1], 0>]
  rt.launch @copy [#rt.view<@t, f32, [2, 3], [3, 1], 0>, #rt.view<@q, f32, [2, 3], [3, 1], 0>]
  rt.launch @neg [#rt.view<@q, f32, [2, 3], [3, 1], 0>, #rt.view<@y, f32, [2, 3], [3, 1], 0>]
}

// CHECK-NOT:  rt.buffer @kk
// CHECK-NOT:  rt.kernel @row attributes
// CHECK:      rt.kernel @parts_0
// CHECK:      tensor.empty
// CHECK:      tensor.expand_shape
// CHECK:      qc.index_update
// CHECK:      qc.index_update
// CHECK:      rt.yield
// CHECK:      rt.entry @main
// CHECK-NEXT: rt.launch @parts_0 [#rt.view<@x, f32, [2, 3], [3, 1], 0>, #rt.view<@i, i64, [1], [1], 0>, #rt.view<@x, f32, [2, 1, 3], [3, 3, 1], 0>, #rt.view<@q, {{.*}}>, #rt.view<@k, {{.*}}>, #rt.view<@v,
// CHECK-NEXT: rt.launch @rows
// CHECK-NEXT: rt.launch @neg [#rt.view<@q, {{.*}}#rt.view<@t,
// CHECK-NEXT: rt.launch @copy [#rt.view<@t, {{.*}}#rt.view<@q,
// CHECK-NEXT: rt.launch @neg [#rt.view<@q, {{.*}}#rt.view<@y,
// CHECK-NEXT: }

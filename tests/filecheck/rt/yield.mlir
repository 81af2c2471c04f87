// CHECK: rt.yield %y : tensor<?x8xf32, #qc.dims<["s", 8]>>
rt.kernel @softmax attributes {symbols = ["s"], operands = [#rt.operand<"x", f32, "r", ["s", 8], [8, 1]>, #rt.operand<"out", f32, "w", ["s", 8], [8, 1]>], serves = "classifier"} {
^bb0(%x: tensor<?x8xf32, #qc.dims<["s", 8]>>, %out: tensor<?x8xf32, #qc.dims<["s", 8]>>):
  %y = qc.softmax %x {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
  rt.yield %y : tensor<?x8xf32, #qc.dims<["s", 8]>>
}

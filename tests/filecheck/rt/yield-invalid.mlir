// CHECK: writes 0 operands but yields 1
rt.kernel @k attributes {symbols = [], operands = [#rt.operand<"x", f32, "r", [1], [1]>]} {
^bb0(%x: tensor<1xf32>):
  rt.yield %x : tensor<1xf32>
}

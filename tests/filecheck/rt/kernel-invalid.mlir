// CHECK: has 0 operands but 1 block arguments
rt.kernel @k attributes {symbols = [], operands = []} {
^bb0(%x: tensor<1xf32>):
  rt.yield
}

// -----

// CHECK: writes 1 operands but yields 0
rt.kernel @k attributes {symbols = [], operands = [#rt.operand<"x", f32, "w", [1], [1]>]} {
^bb0(%x: tensor<1xf32>):
  rt.yield
}

// -----

// CHECK: is not a terminator
rt.kernel @k attributes {symbols = [], operands = []} {
  rt.event @e
}

// -----

// CHECK: access must be
rt.kernel @k attributes {symbols = [], operands = [#rt.operand<"x", f32, "rx", [1], [1]>]}

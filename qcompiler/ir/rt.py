"""The `rt` dialect: the schedule, one to one with `qcompiler.plan`. No SSA values: everything is named, as in the plan.

    rt.device @d0 {kind = "cpu", index = 0}
    rt.stream @s0 {device = @d0}
    rt.event @e0
    rt.arena @activations {device = @d0, kind = "activations", nbytes = 4096}
    rt.buffer @b0 {arena = @activations, offset = 0, nbytes = 1024}
    rt.kernel @linear_0 {symbols, operands = [#rt.operand<…>]} ({ the one compute op, on tensors })
    rt.entry @main {symbols, ranges, inputs, outputs} ({
      rt.launch @linear_0 on @s0 (#rt.view<…>, …)
      rt.select …   rt.copy …   rt.record …   rt.wait …   rt.library_call …
    })
"""

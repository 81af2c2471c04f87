// CHECK: rt.event @e0
rt.event @e0

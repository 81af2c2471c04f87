// RUN: qc opt %s | filecheck %s

// CHECK: rt.event @e0
rt.event @e0

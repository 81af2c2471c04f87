// CHECK: holds rt.event, which is not a step
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.event @e0
}

// -----

// CHECK: property 'outputs' expected in
rt.entry @main attributes {symbols = [], inputs = []} {
}

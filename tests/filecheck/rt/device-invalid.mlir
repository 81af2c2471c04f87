// CHECK: kind must be one of cpu, cuda, sim
rt.device @d {kind = "tpu", index = 0 : i64}

// -----

// CHECK: property 'index' expected in
rt.device @d {kind = "cpu"}

// CHECK: rt.copy on @s0 from <@b0, f32, ["s", 8], [8, 1], 0> to <@b1, f32, ["s", 8], [8, 1], 0>
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.copy on @s0 from <@b0, f32, ["s", 8], [8, 1], 0> to <@b1, f32, ["s", 8], [8, 1], 0>
}

// CHECK: rt.copy from <@b0, f32, ["s", 8], [8, 1], 0> to <@b0, f32, ["s", 8], [8, 1], 0>
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.copy from <@b0, f32, ["s", 8], [8, 1], 0> to <@b0, f32, ["s", 8], [8, 1], 0>
}

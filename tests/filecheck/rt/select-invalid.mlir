// CHECK: should be of base attribute rt.case
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.select "s" [#rt.view<@b0, f32, [1], [1], 0>] [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>]
}

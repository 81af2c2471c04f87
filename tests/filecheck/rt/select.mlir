// CHECK: rt.select "b*s" [#rt.case<@k0, 1>, #rt.case<@k1>] on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>]
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.select "b*s" [#rt.case<@k0, 1>, #rt.case<@k1>] on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>]
}

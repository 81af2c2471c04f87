// CHECK: rt.entry @main attributes {symbols = [#rt.symbol<"b", 1, 8>, #rt.symbol<"s", 1, 512>], inputs = [#rt.sig<"input_ids", @in0, i64, ["b", "s"], "torch.int64">], outputs = [#rt.sig<"y", @out0, f32, ["b", 4]>]} {
rt.entry @main attributes {symbols = [#rt.symbol<"b", 1, 8>, #rt.symbol<"s", 1, 512>], inputs = [#rt.sig<"input_ids", @in0, i64, ["b", "s"], "torch.int64">], outputs = [#rt.sig<"y", @out0, f32, ["b", 4]>]} {
  rt.record @e0 on @s0
}

// CHECK: rt.entry @init attributes {symbols = [], inputs = [], outputs = [], init} {
rt.entry @init attributes {symbols = [], inputs = [], outputs = [], init} {
}

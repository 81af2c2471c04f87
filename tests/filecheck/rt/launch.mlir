// CHECK: rt.launch @k0 on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>]
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.launch @k0 on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>]
}

// CHECK: rt.launch @k0 []
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.launch @k0 []
}

// CHECK: rt.launch @k0 on @s0 [#rt.view<@w, bf16, [8, 64], [], 0, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"cpu_p16_v1">>, #rt.view<@b1, f32, [], [], "8*s">]
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.launch @k0 on @s0 [#rt.view<@w, bf16, [8, 64], [], 0, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"cpu_p16_v1">>, #rt.view<@b1, f32, [], [], "8*s">]
}

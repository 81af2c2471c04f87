// CHECK: property 'region' expected in
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.torch_call "aten.foo.default" on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>] to [#rt.view<@b1, f32, ["s", 8], [8, 1], 0>] {sizes = ["s"], serves = "stft"}
}

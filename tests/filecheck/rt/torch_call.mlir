// CHECK: rt.torch_call "aten.foo.default" on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>] to [#rt.view<@b1, f32, ["s", 8], [8, 1], 0>] {region = {inputs = 1 : i64, ops = [{target = "aten.foo.default", args = [{v = 0 : i64}, true, 5.000000e-01 : f64]}], outputs = [1 : i64]}, sizes = ["s"], serves = "stft"}
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.torch_call "aten.foo.default" on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>] to [#rt.view<@b1, f32, ["s", 8], [8, 1], 0>] {region = {inputs = 1 : i64, ops = [{target = "aten.foo.default", args = [{v = 0 : i64}, true, 5.000000e-01 : f64]}], outputs = [1 : i64]}, sizes = ["s"], serves = "stft"}
}

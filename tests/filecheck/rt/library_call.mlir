// CHECK: rt.library_call "gemm" on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>] {algorithm = "algo 3", workspace = @ws, writes = array<i64: 0>}
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.library_call "gemm" on @s0 [#rt.view<@b0, f32, ["s", 8], [8, 1], 0>] {algorithm = "algo 3", workspace = @ws, writes = array<i64: 0>}
}

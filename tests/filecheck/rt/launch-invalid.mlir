// CHECK: element type f80 is not one of
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.launch @k0 [#rt.view<@b0, f80, [1], [1], 0>]
}

// -----

// CHECK: uses something other than
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.launch @k0 [#rt.view<@b0, f32, ["1.5"], [1], 0>]
}

// -----

// CHECK: Expected ','
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.launch @k0 [#rt.view<@b0, f32, [1], [1]>]
}

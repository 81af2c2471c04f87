// CHECK: attribute expected
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.record on @s0
}

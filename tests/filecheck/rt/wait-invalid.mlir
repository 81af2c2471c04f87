// CHECK: attribute expected
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.wait on @s0
}

// CHECK: '<' expected
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.copy on @s0 from @b0 to @b1
}

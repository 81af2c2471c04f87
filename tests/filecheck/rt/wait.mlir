// CHECK: rt.wait @e0 on @s0
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.wait @e0 on @s0
}

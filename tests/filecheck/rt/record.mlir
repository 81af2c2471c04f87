// CHECK: rt.record @e0 on @s0
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.record @e0 on @s0
}

// CHECK: Expected 'on'
rt.stream @s0

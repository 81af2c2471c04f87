// CHECK: rt.stream @s0 on @gpu
rt.stream @s0 on @gpu

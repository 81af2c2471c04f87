// CHECK: expect symbol name
rt.event

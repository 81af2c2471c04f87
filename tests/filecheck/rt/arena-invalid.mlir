// CHECK: kind must be one of constants, init, activations, state, input, output
rt.arena @a {device = @gpu, kind = "heap", nbytes = 0 : i64}

// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: kind must be one of constants, init, activations, state, input, output
rt.arena @a {device = @gpu, kind = "heap", nbytes = 0 : i64}

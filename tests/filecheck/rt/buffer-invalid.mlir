// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: property 'nbytes' expected in
rt.buffer @b0 {arena = @act}

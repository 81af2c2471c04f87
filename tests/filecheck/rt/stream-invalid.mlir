// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: Expected 'on'
rt.stream @s0

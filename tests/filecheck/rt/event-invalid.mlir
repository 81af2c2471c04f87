// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: expect symbol name
rt.event

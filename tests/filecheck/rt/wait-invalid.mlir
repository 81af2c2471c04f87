// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: attribute expected
rt.entry @main attributes {symbols = [], inputs = [], outputs = []} {
  rt.wait on @s0
}

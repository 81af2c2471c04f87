// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: property 'arguments' expected
%x = "test.op"() : () -> tensor<3xf32>
%0 = qc.torch_call "aten.foo.default" %x : tensor<3xf32>

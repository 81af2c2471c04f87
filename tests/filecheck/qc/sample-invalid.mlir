// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: x must be (rows, n), not of rank 1
%x, %h, %m = "test.op"() : () -> (tensor<8xf32>, tensor<2x10xi64>, tensor<2x8xf32>)
%0 = qc.sample %x, %h, %m, %m : tensor<2xi64>

// -----

// CHECK: a row has 4194305 entries; it must have 1 to 4194304
%x, %h, %m = "test.op"() : () -> (tensor<3x4194305xf32>, tensor<2x10xi64>, tensor<2x4194305xf32>)
%0 = qc.sample %x, %h, %m, %m : tensor<2xi64>

// -----

// CHECK: how must have 10 words for each sequence
%x, %h, %m = "test.op"() : () -> (tensor<3x8xf32>, tensor<2x9xi64>, tensor<2x8xf32>)
%0 = qc.sample %x, %h, %m, %m : tensor<2xi64>

// -----

// CHECK: how must be i64
%x, %h, %m = "test.op"() : () -> (tensor<3x8xf32>, tensor<2x10xi32>, tensor<2x8xf32>)
%0 = qc.sample %x, %h, %m, %m : tensor<2xi64>

// -----

// CHECK: bias must be f32
%x, %h, %m, %b = "test.op"() : () -> (tensor<3x8xf32>, tensor<2x10xi64>, tensor<2x8xf32>, tensor<2x8xf16>)
%0 = qc.sample %x, %h, %m, %b : tensor<2xi64>

// -----

// CHECK: tallies must have shape (2, 8)
%x, %h, %m, %b = "test.op"() : () -> (tensor<3x8xf32>, tensor<2x10xi64>, tensor<3x8xf32>, tensor<2x8xf32>)
%0 = qc.sample %x, %h, %m, %b : tensor<2xi64>

// -----

// CHECK: the result must have shape (2,)
%x, %h, %m = "test.op"() : () -> (tensor<3x8xf32>, tensor<2x10xi64>, tensor<2x8xf32>)
%0 = qc.sample %x, %h, %m, %m : tensor<3xi64>

// -----

// CHECK: the result must be i64
%x, %h, %m = "test.op"() : () -> (tensor<3x8xf32>, tensor<2x10xi64>, tensor<2x8xf32>)
%0 = qc.sample %x, %h, %m, %m : tensor<2xi32>

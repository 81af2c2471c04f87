// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: a row has 513 scores; it must have 1 to 512
%x = "test.op"() : () -> tensor<3x513xf32>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<3x2xf32>, tensor<3x2xi64>

// -----

// CHECK: a row has s scores; it must have 1 to 512
%x = "test.op"() : () -> tensor<3x?xf32, #qc.dims<[3, "s"]>>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<3x2xf32>, tensor<3x2xi64>

// -----

// CHECK: k = 9 must be 1 to 8
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 9, scores = "all"} : tensor<3x9xf32>, tensor<3x9xi64>

// -----

// CHECK: k = 33 must be 1 to 32
%x = "test.op"() : () -> tensor<3x64xf32>
%0, %1 = qc.route %x {k = 33, scores = "all"} : tensor<3x33xf32>, tensor<3x33xi64>

// -----

// CHECK: k = 0 must be 1 to 8
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 0, scores = "all"} : tensor<3x0xf32>, tensor<3x0xi64>

// -----

// CHECK: scores must be one of all, chosen
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 2, scores = "sigmoid"} : tensor<3x2xf32>, tensor<3x2xi64>

// -----

// CHECK: weights of chosen scores sum to 1: normalise does not apply
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 2, scores = "chosen", normalise} : tensor<3x2xf32>, tensor<3x2xi64>

// -----

// CHECK: weights must have shape (3, 2)
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<3x3xf32>, tensor<3x2xi64>

// -----

// CHECK: indices must have shape (3, 2)
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<3x2xf32>, tensor<2x2xi64>

// -----

// CHECK: x must be one of f32, bf16, f16
%x = "test.op"() : () -> tensor<3x8xi32>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<3x2xf32>, tensor<3x2xi64>

// -----

// CHECK: weights must be one of f32, bf16, f16
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<3x2xi32>, tensor<3x2xi64>

// -----

// CHECK: indices must be i64
%x = "test.op"() : () -> tensor<3x8xf32>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<3x2xf32>, tensor<3x2xi32>

// -----

// CHECK: x must have a rank of at least 1
%x = "test.op"() : () -> tensor<f32>
%0, %1 = qc.route %x {k = 2, scores = "all"} : tensor<2xf32>, tensor<2xi64>

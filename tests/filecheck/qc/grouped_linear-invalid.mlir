// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: offsets must be i32
%x, %w, %o = "test.op"() : () -> (tensor<7x8xf32>, tensor<3x5x8xf32>, tensor<4xi64>)
%0 = qc.grouped_linear %x, %w, %o : tensor<7x5xf32>

// -----

// CHECK: does not hold 4 groups
%x, %w, %o = "test.op"() : () -> (tensor<7x8xf32>, tensor<3x5x8xf32>, tensor<5xi32>)
%0 = qc.grouped_linear %x, %w, %o : tensor<7x5xf32>

// -----

// CHECK: x has K = 9 but w has K = 8
%x, %w, %o = "test.op"() : () -> (tensor<7x9xf32>, tensor<3x5x8xf32>, tensor<4xi32>)
%0 = qc.grouped_linear %x, %w, %o : tensor<7x5xf32>

// -----

// CHECK: 4 rows of w are not a multiple of 3 groups
%x, %w, %o = "test.op"() : () -> (tensor<7x64xf32>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<4xi32>)
%0 = qc.grouped_linear %x, %w, %o : tensor<7x2xf32>

// -----

// CHECK: the result must have shape (7, 5)
%x, %w, %o = "test.op"() : () -> (tensor<7x8xf32>, tensor<3x5x8xf32>, tensor<4xi32>)
%0 = qc.grouped_linear %x, %w, %o : tensor<7x8xf32>

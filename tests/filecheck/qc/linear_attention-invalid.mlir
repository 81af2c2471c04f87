// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: 4 heads cannot share 3 groups of queries and keys
%s, %k, %v, %d, %n = "test.op"() : () -> (tensor<3x4x5x8xf32>, tensor<2x7x3x8xf32>, tensor<2x7x4x5xf32>, tensor<2x7x4x1xf32>, tensor<2xi64>)
%0, %1 = qc.linear_attention %s, %k, %k, %v, %d, %n, %n : tensor<3x4x5x8xf32>, tensor<2x7x4x5xf32>

// -----

// CHECK: 4 sequences have 3 slots
%s, %k, %v, %d, %n = "test.op"() : () -> (tensor<3x4x5x8xf32>, tensor<4x7x2x8xf32>, tensor<4x7x4x5xf32>, tensor<4x7x4x1xf32>, tensor<4xi64>)
%0, %1 = qc.linear_attention %s, %k, %k, %v, %d, %n, %n : tensor<3x4x5x8xf32>, tensor<4x7x4x5xf32>

// -----

// CHECK: with a rate, decay has a last dim of 1
%s, %k, %v, %d, %n, %r = "test.op"() : () -> (tensor<3x4x5x8xf32>, tensor<2x7x2x8xf32>, tensor<2x7x4x5xf32>, tensor<2x7x4x8xf32>, tensor<2xi64>, tensor<4x8xf32>)
%0, %1 = qc.linear_attention %s, %k, %k, %v, %d, %n, %n rate(%r) : tensor<3x4x5x8xf32>, tensor<2x7x4x5xf32>

// -----

// CHECK: counts must be i64
%s, %k, %v, %d, %n, %c = "test.op"() : () -> (tensor<3x4x5x8xf32>, tensor<2x7x2x8xf32>, tensor<2x7x4x5xf32>, tensor<2x7x4x1xf32>, tensor<2xi64>, tensor<2xi32>)
%0, %1 = qc.linear_attention %s, %k, %k, %v, %d, %n, %c : tensor<3x4x5x8xf32>, tensor<2x7x4x5xf32>

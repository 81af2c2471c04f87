// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: a row has 0 entries; it must have 1 to 4194304
%x, %s = "test.op"() : () -> (tensor<3x0xf32>, tensor<3xf32>)
%0 = qc.top_p %x, %s, %s : tensor<3xi64>

// -----

// CHECK: a row has 4194305 entries; it must have 1 to 4194304
%x, %s = "test.op"() : () -> (tensor<3x4194305xf32>, tensor<3xf32>)
%0 = qc.top_p %x, %s, %s : tensor<3xi64>

// -----

// CHECK: x must have a rank of at least 1
%x, %s = "test.op"() : () -> (tensor<f32>, tensor<f32>)
%0 = qc.top_p %x, %s, %s : tensor<i64>

// -----

// CHECK: top must have shape (3,)
%x, %s, %t = "test.op"() : () -> (tensor<3x8xf32>, tensor<3xf32>, tensor<4xf32>)
%0 = qc.top_p %x, %t, %s : tensor<3xi64>

// -----

// CHECK: draw must be f32
%x, %s, %t = "test.op"() : () -> (tensor<3x8xf32>, tensor<3xf32>, tensor<3xbf16>)
%0 = qc.top_p %x, %s, %t : tensor<3xi64>

// -----

// CHECK: the result must have shape (3,)
%x, %s = "test.op"() : () -> (tensor<3x8xf32>, tensor<3xf32>)
%0 = qc.top_p %x, %s, %s : tensor<3x8xi64>

// -----

// CHECK: the result must be i64
%x, %s = "test.op"() : () -> (tensor<3x8xf32>, tensor<3xf32>)
%0 = qc.top_p %x, %s, %s : tensor<3xi32>

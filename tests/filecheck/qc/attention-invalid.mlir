// CHECK: q, k and v need rank 4
%q, %k, %v = "test.op"() : () -> (tensor<4x3x8xf32>, tensor<?x2x?x8xf32, #qc.dims<["b", 2, "t", 8]>>, tensor<?x2x?x6xf32, #qc.dims<["b", 2, "t", 6]>>)
%0 = qc.attention %q, %k, %v {scale = 1.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>

// -----

// CHECK: batch dims differ
%q, %k, %v = "test.op"() : () -> (tensor<3x4x2x8xf32>, tensor<?x2x?x8xf32, #qc.dims<["b", 2, "t", 8]>>, tensor<?x2x?x6xf32, #qc.dims<["b", 2, "t", 6]>>)
%0 = qc.attention %q, %k, %v {scale = 1.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>

// -----

// CHECK: q, k and v do not fit together
%q, %k, %v = "test.op"() : () -> (tensor<?x4x?x8xf32, #qc.dims<["b", 4, "s", 8]>>, tensor<?x2x?x8xf32, #qc.dims<["b", 2, "t", 8]>>, tensor<?x2x?x6xf32, #qc.dims<["b", 2, "s", 6]>>)
%0 = qc.attention %q, %k, %v {scale = 1.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>

// -----

// CHECK: the result must have shape
%q, %k, %v = "test.op"() : () -> (tensor<?x4x?x8xf32, #qc.dims<["b", 4, "s", 8]>>, tensor<?x2x?x8xf32, #qc.dims<["b", 2, "t", 8]>>, tensor<?x2x?x6xf32, #qc.dims<["b", 2, "t", 6]>>)
%0 = qc.attention %q, %k, %v {scale = 1.0} : tensor<?x4x?x8xf32, #qc.dims<["b", 4, "s", 8]>>

// -----

// CHECK: 4 heads are not a multiple of 3 kv heads
%q, %k = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x3x5x8xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0} : tensor<1x4x5x8xf32>

// -----

// CHECK: does not broadcast to
%q, %k, %v, %m = "test.op"() : () -> (tensor<?x4x?x8xf32, #qc.dims<["b", 4, "s", 8]>>, tensor<?x2x?x8xf32, #qc.dims<["b", 2, "t", 8]>>, tensor<?x2x?x6xf32, #qc.dims<["b", 2, "t", 6]>>, tensor<1x1x1x7xi1>)
%0 = qc.attention %q, %k, %v mask(%m) {scale = 1.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>

// -----

// CHECK: a window shows at least one key
%q, %k = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0, causal, window = 0} : tensor<1x4x5x8xf32>

// -----

// CHECK: softcap must be positive
%q, %k = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0, softcap = 0.0} : tensor<1x4x5x8xf32>

// -----

// CHECK: last of shape ('b', 't') does not broadcast to ('b', 's')
%q, %k, %v, %n = "test.op"() : () -> (tensor<?x4x?x8xf32, #qc.dims<["b", 4, "s", 8]>>, tensor<?x2x?x8xf32, #qc.dims<["b", 2, "t", 8]>>, tensor<?x2x?x6xf32, #qc.dims<["b", 2, "t", 6]>>, tensor<?x?xi64, #qc.dims<["b", "t"]>>)
%0 = qc.attention %q, %k, %v last(%n) {scale = 1.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>

// -----

// CHECK: last must be i32 or i64
%q, %k, %n = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x5xf32>)
%0 = qc.attention %q, %k, %k last(%n) {scale = 1.0} : tensor<1x4x5x8xf32>

// -----

// CHECK: causal and last exclude each other
%q, %k, %n = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x5xi64>)
%0 = qc.attention %q, %k, %k last(%n) {scale = 1.0, causal} : tensor<1x4x5x8xf32>

// -----

// CHECK: cache is one of int8, fp8
%q, %k = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x16xi8>)
%0 = qc.attention %q, %k, %k {scale = 1.0, cache = "int3"} : tensor<1x4x5x8xf32>

// -----

// CHECK: k holds the rows of a cache, i8
%q, %k = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x16xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0, cache = "int8"} : tensor<1x4x5x8xf32>

// -----

// CHECK: v must have shape (1, 4, 5, 32), not (1, 4, 5, 16)
%q, %k = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x16xi8>)
%0 = qc.attention %q, %k, %k {scale = 1.0, cache = "int8"} : tensor<1x4x5x20xf32>

// -----

// CHECK: a ring needs last and a window, and takes no mask
%q, %k, %n = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x12x8xf32>, tensor<1x5xi64>)
%0 = qc.attention %q, %k, %k last(%n) {scale = 1.0, ring} : tensor<1x4x5x8xf32>

// -----

// CHECK: a ring of 12 rows is shorter than window + queries - 1 = 13
%q, %k, %n = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x12x8xf32>, tensor<1x5xi64>)
%0 = qc.attention %q, %k, %k last(%n) {scale = 1.0, window = 9, ring} : tensor<1x4x5x8xf32>

// -----

// CHECK: parts is at least 1
%q, %k = "test.op"() : () -> (tensor<1x4x1x8xf32>, tensor<1x4x5x8xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0, parts = 0} : tensor<1x4x1x0x10xf32>

// -----

// CHECK: the result in parts is (B, H, S, 3, Dv + 2)
%q, %k = "test.op"() : () -> (tensor<1x4x1x8xf32>, tensor<1x4x5x8xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0, parts = 3} : tensor<1x4x1x8xf32>

// -----

// CHECK: the result must have shape (1, 4, 1, 8), not (1, 4, 1, 6)
%q, %k = "test.op"() : () -> (tensor<1x4x1x8xf32>, tensor<1x4x5x8xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0, parts = 3} : tensor<1x4x1x3x8xf32>

// -----

// CHECK: the result in parts is f32
%q, %k = "test.op"() : () -> (tensor<1x4x1x8xbf16>, tensor<1x4x5x8xbf16>)
%0 = qc.attention %q, %k, %k {scale = 1.0, parts = 3} : tensor<1x4x1x3x10xbf16>

// -----

// CHECK: only qc.join_attention reads a result in parts
%q, %k = "test.op"() : () -> (tensor<1x4x1x8xf32>, tensor<1x4x5x8xf32>)
%0 = qc.attention %q, %k, %k {scale = 1.0, parts = 3} : tensor<1x4x1x3x10xf32>
"test.op"(%0) : (tensor<1x4x1x3x10xf32>) -> ()

// -----

// CHECK: sinks of shape (1, 3, 1, 1) do not broadcast to (1, 4, 5, 1)
%q, %k, %sinks = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x3x1x1xf32>)
%0 = qc.attention %q, %k, %k sinks(%sinks) {scale = 1.0} : tensor<1x4x5x8xf32>

// -----

// CHECK: sinks of shape (4,) do not broadcast to (1, 4, 5, 1)
%q, %k, %sinks = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<4xf32>)
%0 = qc.attention %q, %k, %k sinks(%sinks) {scale = 1.0} : tensor<1x4x5x8xf32>

// -----

// CHECK: sinks are one of f32, bf16, f16
%q, %k, %sinks = "test.op"() : () -> (tensor<1x4x5x8xf32>, tensor<1x4x5x8xf32>, tensor<1x4x1x1xi64>)
%0 = qc.attention %q, %k, %k sinks(%sinks) {scale = 1.0} : tensor<1x4x5x8xf32>

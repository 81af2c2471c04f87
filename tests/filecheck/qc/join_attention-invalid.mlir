// CHECK: x has the shape (B, H, S, P, Dv + 2)
%x = "test.op"() : () -> tensor<1x4x1x8xf32>
%0 = qc.join_attention %x : tensor<1x4x1x6xf32>

// -----

// CHECK: x has a known number of parts
%x = "test.op"() : () -> tensor<1x4x1x?x8xf32, #qc.dims<[1, 4, 1, "p", 8]>>
%0 = qc.join_attention %x : tensor<1x4x1x6xf32>

// -----

// CHECK: x is f32
%x = "test.op"() : () -> tensor<1x4x1x3x8xbf16>
%0 = qc.join_attention %x : tensor<1x4x1x6xbf16>

// -----

// CHECK: the result must have shape (1, 4, 1, 6), not (1, 4, 1, 8)
%x = "test.op"() : () -> tensor<1x4x1x3x8xf32>
%0 = qc.join_attention %x : tensor<1x4x1x8xf32>

// -----

// CHECK: the result is one of f32, bf16, f16
%x = "test.op"() : () -> tensor<1x4x1x3x8xf32>
%0 = qc.join_attention %x : tensor<1x4x1x6xf64>

// CHECK: runs of 64 columns do not divide 96 columns
%x = "test.op"() : () -> tensor<4x96xf32>
%0 = qc.hadamard %x {block = 64} : tensor<4x96xf32>

// -----

// CHECK: a run of 48 columns is no power of two from 2 to 8192
%x = "test.op"() : () -> tensor<4x96xf32>
%0 = qc.hadamard %x {block = 48} : tensor<4x96xf32>

// -----

// CHECK: x is one of f32, bf16, f16
%x = "test.op"() : () -> tensor<4x96xi32>
%0 = qc.hadamard %x {block = 32} : tensor<4x96xi32>

// -----

// CHECK: the result has the type of x
%x = "test.op"() : () -> tensor<4x96xf32>
%0 = "qc.hadamard"(%x) <{block = 32 : i64}> : (tensor<4x96xf32>) -> tensor<4x96xbf16>

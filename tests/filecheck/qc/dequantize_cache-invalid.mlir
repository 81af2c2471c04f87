// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: rows must have shape (2, 80), not (2, 64)
%x = "test.op"() : () -> tensor<2x64xi8>
%0 = qc.dequantize_cache %x {kind = "int8"} : tensor<2x64xf32>

// -----

// CHECK: kind is one of int8, fp8
%x = "test.op"() : () -> tensor<2x80xi8>
%0 = qc.dequantize_cache %x {kind = "int3"} : tensor<2x64xf32>

// -----

// CHECK: rows hold i8
%x = "test.op"() : () -> tensor<2x80xf32>
%0 = qc.dequantize_cache %x {kind = "int8"} : tensor<2x64xf32>

// -----

// CHECK: the result is one of f32, bf16, f16
%x = "test.op"() : () -> tensor<2x80xi8>
%0 = qc.dequantize_cache %x {kind = "int8"} : tensor<2x64xi32>

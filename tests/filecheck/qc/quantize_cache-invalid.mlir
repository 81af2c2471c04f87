// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: the result must have shape (2, 80), not (2, 64)
%x = "test.op"() : () -> tensor<2x64xf32>
%0 = qc.quantize_cache %x {kind = "int8"} : tensor<2x64xi8>

// -----

// CHECK: kind is one of int8, fp8
%x = "test.op"() : () -> tensor<2x64xf32>
%0 = qc.quantize_cache %x {kind = "int3"} : tensor<2x80xi8>

// -----

// CHECK: x is one of f32, bf16, f16
%x = "test.op"() : () -> tensor<2x64xi32>
%0 = qc.quantize_cache %x {kind = "int8"} : tensor<2x80xi8>

// -----

// CHECK: x needs a last dim of a known size
%x = "test.op"() : () -> tensor<2x?xf32, #qc.dims<[2, "s"]>>
%0 = qc.quantize_cache %x {kind = "int8"} : tensor<2x80xi8>

// -----

// CHECK: the result holds i8
%x = "test.op"() : () -> tensor<2x64xf32>
%0 = qc.quantize_cache %x {kind = "int8"} : tensor<2x80xf32>

// RUN: qc opt %s | filecheck %s

%x = "test.op"() : () -> tensor<2x?x64xbf16, #qc.dims<[2, "s", 64]>>
// CHECK: qc.quantize_cache %x {kind = "int8"} : tensor<2x?x80xi8, #qc.dims<[2, "s", 80]>>
%0 = qc.quantize_cache %x {kind = "int8"} : tensor<2x?x80xi8, #qc.dims<[2, "s", 80]>>

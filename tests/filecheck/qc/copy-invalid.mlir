// CHECK: a copy from cpu to itself
%0 = "test.op"() : () -> tensor<8xf32>
%1 = qc.copy %0 {source = "cpu", target = "cpu"} : tensor<8xf32>

// -----

// CHECK: a copy does not change the type
%0 = "test.op"() : () -> tensor<8xf32>
%1 = qc.copy %0 {source = "cpu", target = "sim:0"} : tensor<8xf16>

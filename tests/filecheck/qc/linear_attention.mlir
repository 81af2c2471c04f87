// RUN: qc opt %s | filecheck %s

%s, %k, %v, %d, %n = "test.op"() : () -> (tensor<3x4x5x8xf32>, tensor<2x?x2x8xf32, #qc.dims<[2, "s", 2, 8]>>, tensor<2x?x4x5xf32, #qc.dims<[2, "s", 4, 5]>>, tensor<2x?x4x1xf32, #qc.dims<[2, "s", 4, 1]>>, tensor<2xi64>)
// CHECK: qc.linear_attention
%0, %1 = "qc.linear_attention"(%s, %k, %k, %v, %d, %n, %n) <{operandSegmentSizes = array<i32: 1, 1, 1, 1, 1, 1, 1, 0, 0>}> : (tensor<3x4x5x8xf32>, tensor<2x?x2x8xf32, #qc.dims<[2, "s", 2, 8]>>, tensor<2x?x2x8xf32, #qc.dims<[2, "s", 2, 8]>>, tensor<2x?x4x5xf32, #qc.dims<[2, "s", 4, 5]>>, tensor<2x?x4x1xf32, #qc.dims<[2, "s", 4, 1]>>, tensor<2xi64>, tensor<2xi64>) -> (tensor<3x4x5x8xf32>, tensor<2x?x4x5xf32, #qc.dims<[2, "s", 4, 5]>>)

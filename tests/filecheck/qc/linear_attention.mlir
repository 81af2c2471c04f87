// RUN: qc opt %s | filecheck %s

%s, %k, %v, %d, %n = "test.op"() : () -> (tensor<3x4x5x8xf32>, tensor<2x?x2x8xf32, #qc.dims<[2, "s", 2, 8]>>, tensor<2x?x4x5xf32, #qc.dims<[2, "s", 4, 5]>>, tensor<2x?x4x1xf32, #qc.dims<[2, "s", 4, 1]>>, tensor<2xi64>)
// CHECK: qc.linear_attention %s, %k, %k, %v, %d, %n, %n : tensor<3x4x5x8xf32>, tensor<2x?x4x5xf32, #qc.dims<[2, "s", 4, 5]>>
%0, %1 = qc.linear_attention %s, %k, %k, %v, %d, %n, %n : tensor<3x4x5x8xf32>, tensor<2x?x4x5xf32, #qc.dims<[2, "s", 4, 5]>>

%a, %b, %r, %w, %i, %e, %f = "test.op"() : () -> (tensor<1x4x1x8xf32>, tensor<1x6x1x8xf32>, tensor<4x8xf32>, tensor<1x6x4x1xf32>, tensor<1xi64>, tensor<1x6x4xf32>, tensor<1x6x4x8xf32>)
// CHECK: qc.linear_attention %a, %b, %b, %w, %w, %i, %i rate(%r) : tensor<1x4x1x8xf32>, tensor<1x6x4x1xf32>
%2, %3 = qc.linear_attention %a, %b, %b, %w, %w, %i, %i rate(%r) : tensor<1x4x1x8xf32>, tensor<1x6x4x1xf32>
// CHECK: qc.linear_attention %a, %b, %b, %w, %f, %i, %i beta(%e) : tensor<1x4x1x8xf32>, tensor<1x6x4x1xf32>
%4, %5 = qc.linear_attention %a, %b, %b, %w, %f, %i, %i beta(%e) : tensor<1x4x1x8xf32>, tensor<1x6x4x1xf32>

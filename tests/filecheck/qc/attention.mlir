%q, %k, %v, %m = "test.op"() : () -> (tensor<?x4x?x8xf32, #qc.dims<["b", 4, "s", 8]>>, tensor<?x2x?x8xf32, #qc.dims<["b", 2, "t", 8]>>, tensor<?x2x?x6xf32, #qc.dims<["b", 2, "t", 6]>>, tensor<1x1x?x?xi1, #qc.dims<[1, 1, "s", "t"]>>)
// CHECK: qc.attention %q, %k, %v mask(%m) {scale = 1.250000e-01} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
%0 = qc.attention %q, %k, %v mask(%m) {scale = 0.125} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
// CHECK-NEXT: qc.attention %q, %k, %v {scale = 1.000000e+00, causal} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
%1 = qc.attention %q, %k, %v {scale = 1.0, causal} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
// CHECK-NEXT: qc.attention %q, %k, %v {scale = 1.000000e+00, causal, window = 8, softcap = 5.000000e+01} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
%2 = qc.attention %q, %k, %v {scale = 1.0, causal, window = 8, softcap = 50.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
%n, %one = "test.op"() : () -> (tensor<?x?xi64, #qc.dims<["b", "s"]>>, tensor<1x1xi32>)
// CHECK: qc.attention %q, %k, %v last(%n) {scale = 1.000000e+00} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
%3 = qc.attention %q, %k, %v last(%n) {scale = 1.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
// CHECK-NEXT: qc.attention %q, %k, %v mask(%m) last(%one) {scale = 1.000000e+00, window = 64} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
%4 = qc.attention %q, %k, %v mask(%m) last(%one) {scale = 1.0, window = 64} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>

%ring, %near = "test.op"() : () -> (tensor<1x2x12x8xf32>, tensor<1x4x5x8xf32>)
%at = "test.op"() : () -> tensor<1x5xi64>
// CHECK: qc.attention %near, %ring, %ring last(%at) {scale = 1.000000e+00, window = 8, ring} : tensor<1x4x5x8xf32>
%in_ring = qc.attention %near, %ring, %ring last(%at) {scale = 1.0, window = 8, ring} : tensor<1x4x5x8xf32>

%rows = "test.op"() : () -> tensor<1x2x9x16xi8>
%few = "test.op"() : () -> tensor<1x4x5x8xf32>
// CHECK: qc.attention %few, %rows, %rows {scale = 5.000000e-01, cache = "int8"} : tensor<1x4x5x8xf32>
%of_rows = qc.attention %few, %rows, %rows {scale = 0.5, cache = "int8"} : tensor<1x4x5x8xf32>

%one_query, %cache = "test.op"() : () -> (tensor<?x4x1x8xbf16, #qc.dims<["b", 4, 1, 8]>>, tensor<?x2x9x8xbf16, #qc.dims<["b", 2, 9, 8]>>)
// CHECK: qc.attention %one_query, %cache, %cache {scale = 5.000000e-01, parts = 3} : tensor<?x4x1x3x10xf32, #qc.dims<["b", 4, 1, 3, 10]>>
%in_parts = qc.attention %one_query, %cache, %cache {scale = 0.5, parts = 3} : tensor<?x4x1x3x10xf32, #qc.dims<["b", 4, 1, 3, 10]>>

%sinks = "test.op"() : () -> tensor<1x4x1x1xbf16>
// CHECK: qc.attention %near, %ring, %ring last(%at) sinks(%sinks) {scale = 1.000000e+00, window = 8, ring} : tensor<1x4x5x8xf32>
%beside = qc.attention %near, %ring, %ring last(%at) sinks(%sinks) {scale = 1.0, window = 8, ring} : tensor<1x4x5x8xf32>
// CHECK-NEXT: qc.attention %q, %k, %v mask(%m) sinks(%sinks) {scale = 1.000000e+00} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>
%masked = qc.attention %q, %k, %v mask(%m) sinks(%sinks) {scale = 1.0} : tensor<?x4x?x6xf32, #qc.dims<["b", 4, "s", 6]>>

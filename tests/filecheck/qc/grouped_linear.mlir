%x, %w, %i = "test.op"() : () -> (tensor<?x8xbf16, #qc.dims<["s", 8]>>, tensor<15x8xbf16>, tensor<?xi64, #qc.dims<["2*s"]>>)
// CHECK: qc.grouped_linear %x, %w, %i {experts = 3, repeat = 2} : tensor<?x5xbf16, #qc.dims<["2*s", 5]>>
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 2} : tensor<?x5xbf16, #qc.dims<["2*s", 5]>>

%y, %q, %j = "test.op"() : () -> (tensor<7x64xf32>, !qc.qtensor<12x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<7xi32>)
// CHECK: qc.grouped_linear %y, %q, %j {experts = 4, repeat = 1} : tensor<7x3xf32>
%1 = qc.grouped_linear %y, %q, %j {experts = 4, repeat = 1} : tensor<7x3xf32>

%a, %gu, %k = "test.op"() : () -> (tensor<1x8xf32>, tensor<12x8xf32>, tensor<2xi64>)
// CHECK: qc.grouped_linear %a, %gu, %k {experts = 3, repeat = 2, pairs} : tensor<2x2xf32> {
// CHECK-NEXT: ^bb0(%g: f32, %u: f32):
%2 = qc.grouped_linear %a, %gu, %k {experts = 3, repeat = 2, pairs} : tensor<2x2xf32> {
^bb0(%g: f32, %u: f32):
  %m = arith.mulf %g, %u : f32
  qc.yield %m
}

%b, %d, %p, %r = "test.op"() : () -> (tensor<2x8xf32>, tensor<12x8xf32>, tensor<1x2xf32>, tensor<1x4xf32>)
// CHECK: qc.grouped_linear %b, %d, %k weights(%p) extras(%r) {experts = 3, repeat = 1, top = 2} : tensor<1x4xf32> mix {
%3 = qc.grouped_linear %b, %d, %k weights(%p) extras(%r) {experts = 3, repeat = 1, top = 2} : tensor<1x4xf32> mix {
^bb0(%s: f32, %w1: f32, %t: f32):
  %n = arith.mulf %s, %w1 : f32
  %o = arith.addf %t, %n : f32
  qc.yield %o
} {
^bb0(%t1: f32, %e: f32):
  %z = arith.addf %t1, %e : f32
  qc.yield %z
}

%rows, %codes = "test.op"() : () -> (tensor<7x96xi8>, !qc.qtensor<12x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>)
// CHECK: qc.grouped_linear %rows, %codes, %j {experts = 4, repeat = 1} : tensor<7x3xf32>
%4 = qc.grouped_linear %rows, %codes, %j {experts = 4, repeat = 1} : tensor<7x3xf32>

%made, %halves = "test.op"() : () -> (tensor<1x96xi8>, !qc.qtensor<12x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>)
// CHECK: qc.grouped_linear %made, %halves, %k {experts = 3, repeat = 2, pairs} : tensor<2x2xf32> {
// CHECK-NEXT: ^bb0(%g2: f32, %u2: f32):
%5 = qc.grouped_linear %made, %halves, %k {experts = 3, repeat = 2, pairs} : tensor<2x2xf32> {
^bb0(%g2: f32, %u2: f32):
  %m2 = arith.mulf %g2, %u2 : f32
  qc.yield %m2
}

%two = "test.op"() : () -> tensor<2x96xi8>
// CHECK: qc.grouped_linear %two, %halves, %k weights(%p) {experts = 3, repeat = 1, top = 2} : tensor<1x4xf32> mix {
%6 = qc.grouped_linear %two, %halves, %k weights(%p) {experts = 3, repeat = 1, top = 2} : tensor<1x4xf32> mix {
^bb0(%s2: f32, %w2: f32, %t2: f32):
  %n2 = arith.mulf %s2, %w2 : f32
  %o2 = arith.addf %t2, %n2 : f32
  qc.yield %o2
} {
^bb0(%t3: f32):
  qc.yield %t3
}

%x, %w, %b, %e = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<4xf32>, tensor<1x4xbf16>)
// CHECK: qc.linear %x, %w : tensor<?x4xf32, #qc.dims<["s", 4]>>
%0 = qc.linear %x, %w : tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT: qc.linear %x, %w bias(%b) extras(%e) {qc.path = "head"} : tensor<?x4xf32, #qc.dims<["s", 4]>> {
// CHECK-NEXT: ^bb0(%{{.*}}: f32, %{{.*}}: bf16):
// CHECK-NEXT:   arith.extf
// CHECK-NEXT:   arith.addf
// CHECK-NEXT:   qc.yield %{{[0-9]+}}{{$}}
// CHECK-NEXT: }
%1 = qc.linear %x, %w bias(%b) extras(%e) {qc.path = "head"} : tensor<?x4xf32, #qc.dims<["s", 4]>> {
^bb0(%acc: f32, %extra: bf16):
  %2 = arith.extf %extra : bf16 to f32
  %3 = arith.addf %acc, %2 : f32
  qc.yield %3
}
// CHECK: qc.linear %x, %w bias(%b) {pairs} : tensor<?x2xf32, #qc.dims<["s", 2]>> {
// CHECK-NEXT: ^bb0(%{{.*}}: f32, %{{.*}}: f32):
// CHECK-NEXT:   arith.mulf
// CHECK-NEXT:   qc.yield %{{[0-9]+}}{{$}}
// CHECK-NEXT: }
%4 = qc.linear %x, %w bias(%b) {pairs} : tensor<?x2xf32, #qc.dims<["s", 2]>> {
^bb0(%gate: f32, %up: f32):
  %5 = arith.mulf %gate, %up : f32
  qc.yield %5
}

// CHECK: qc.linear %x2, %w2 : tensor<2x4xf32> prologue {
// CHECK-NEXT: ^bb0
// CHECK-NEXT: qc.rms_norm
// CHECK-NEXT: qc.yield
// CHECK-NEXT: }
// CHECK-NEXT: qc.linear %x2, %w2 bias(%b2) affine(%g2, %b3) : tensor<2x4xf32> prologue {
// CHECK-NEXT: ^bb0
// CHECK-NEXT: qc.layer_norm
// CHECK-NEXT: qc.yield
// CHECK-NEXT: } {
%x2, %w2, %b2, %g2, %b3 = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>, tensor<4xf32>, tensor<8xf32>, tensor<8xf32>)
%n0 = qc.linear %x2, %w2 : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %normed
}
%n1 = qc.linear %x2, %w2 bias(%b2) affine(%g2, %b3) : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>, %gain: tensor<8xf32>, %shift: tensor<8xf32>):
  %normed = qc.layer_norm %rows weight(%gain) bias(%shift) {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %normed
} {
^bb0(%acc: f32):
  %t = math.tanh %acc : f32
  qc.yield %t
}

// CHECK: qc.linear %x3, %w3 affine(%g3) : tensor<2x4xf32> prologue {
// CHECK-NEXT: ^bb0
// CHECK-NEXT: qc.rms_norm
// CHECK-NEXT: qc.quantize_rows
// CHECK-NEXT: qc.yield
// CHECK-NEXT: }
%x3, %w3, %g3 = "test.op"() : () -> (tensor<2x64xf32>, !qc.qtensor<4x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>, tensor<64xf32>)
%n3 = qc.linear %x3, %w3 affine(%g3) : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x64xf32>, %gain: tensor<64xf32>):
  %normed = qc.rms_norm %rows weight(%gain) {eps = 1.000000e-05} : tensor<2x64xf32>
  %codes = qc.quantize_rows %normed {kind = "token", value = 0.000000e+00} : tensor<2x96xi8>
  qc.yield %codes
}

// CHECK: %{{.*}}, %{{.*}} = qc.linear %x3, %w3 : tensor<2x4xf32>, tensor<2x96xi8> prologue {
// CHECK-NEXT: ^bb0
// CHECK-NEXT: qc.quantize_rows
// CHECK-NEXT: qc.yield %{{.*}}, %{{.*}}
// CHECK-NEXT: }
%n5, %codes5 = qc.linear %x3, %w3 : tensor<2x4xf32>, tensor<2x96xi8> prologue {
^bb0(%rows: tensor<2x64xf32>):
  %codes = qc.quantize_rows %rows {kind = "token", value = 0.000000e+00} : tensor<2x96xi8>
  qc.yield %codes, %codes
}

// CHECK: %{{.*}}, %{{.*}} = qc.linear %{{.*}}, %{{.*}} {statistics = "layer"} : tensor<9x40xf32>, tensor<9x4xf32>
// CHECK-NEXT: qc.linear %{{.*}}, %{{.*}} affine(%{{.*}}) : tensor<9x8xf32> prologue {
// CHECK-NEXT: ^bb0
// CHECK-NEXT: qc.layer_norm %{{.*}} statistics(%{{.*}}) {eps = 1.000000e-05} : tensor<9x40xf32>
// CHECK-NEXT: qc.yield
// CHECK-NEXT: }
%many, %first, %second = "test.op"() : () -> (tensor<9x8xf32>, tensor<40x8xf32>, tensor<8x40xf32>)
%written, %parts = qc.linear %many, %first {statistics = "layer"} : tensor<9x40xf32>, tensor<9x4xf32>
%read = qc.linear %written, %second affine(%parts) : tensor<9x8xf32> prologue {
^bb0(%rows: tensor<9x40xf32>, %given: tensor<9x4xf32>):
  %normed = qc.layer_norm %rows statistics(%given) {eps = 1.000000e-05} : tensor<9x40xf32>
  qc.yield %normed
}

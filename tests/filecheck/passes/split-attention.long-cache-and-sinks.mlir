// RUN: qc opt -p split-attention{arch="sm_90a"} %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x32x1x128xbf16>, %1: tensor<1x8x8192x128xbf16>, %2: tensor<1x1xi64>, %3: tensor<1x32x1x1xf32>) -> tensor<1x32x1x128xbf16> {
    %4 = qc.attention %0, %1, %1 last(%2) sinks(%3) {scale = 5.000000e-01, qc.path = "attn"} : tensor<1x32x1x128xbf16>
    func.return %4 : tensor<1x32x1x128xbf16>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x32x1x128xbf16>, %1: tensor<1x8x8192x128xbf16>, %2: tensor<1x1xi64>, %3: tensor<1x32x1x1xf32>) -> tensor<1x32x1x128xbf16> {
// CHECK-NEXT:     %4 = qc.attention %0, %1, %1 last(%2) sinks(%3) {scale = 5.000000e-01, parts = 32, qc.path = "attn"} : tensor<1x32x1x32x130xf32>
// CHECK-NEXT:     %5 = qc.join_attention %4 {qc.path = "attn"} : tensor<1x32x1x128xbf16>
// CHECK-NEXT:     func.return %5 : tensor<1x32x1x128xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

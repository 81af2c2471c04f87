// RUN: qc opt -p split-attention{arch="sm_90a"} %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x32x1x128xbf16>, %1: tensor<1x8x8192x128xbf16>, %2: tensor<1x1xi64>) -> tensor<1x32x1x128xbf16> {
    %3 = qc.attention %0, %1, %1 last(%2) {scale = 5.000000e-01, qc.path = "attn"} : tensor<1x32x1x128xbf16>
    func.return %3 : tensor<1x32x1x128xbf16>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x32x1x128xbf16>, %1: tensor<1x8x8192x128xbf16>, %2: tensor<1x1xi64>) -> tensor<1x32x1x128xbf16> {
// CHECK-NEXT:     %3 = qc.attention %0, %1, %1 last(%2) {scale = 5.000000e-01, parts = 32, qc.path = "attn"} : tensor<1x32x1x32x130xf32>
// CHECK-NEXT:     %4 = qc.join_attention %3 {qc.path = "attn"} : tensor<1x32x1x128xbf16>
// CHECK-NEXT:     func.return %4 : tensor<1x32x1x128xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

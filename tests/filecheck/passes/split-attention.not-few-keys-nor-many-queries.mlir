// RUN: qc opt -p split-attention{arch="sm_90a"} %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x32x1x128xbf16>, %1: tensor<1x8x8192x128xbf16>, %2: tensor<1x1xi64>, %3: tensor<1x32x5x128xbf16>, %4: tensor<64x32x1x128xbf16>, %5: tensor<64x8x8192x128xbf16>) -> (tensor<1x32x1x128xbf16>, tensor<1x32x5x128xbf16>, tensor<64x32x1x128xbf16>) {
    %6 = qc.attention %0, %1, %1 last(%2) {scale = 5.000000e-01, window = 250, qc.path = "window"} : tensor<1x32x1x128xbf16>
    %7 = qc.attention %3, %1, %1 {scale = 5.000000e-01, qc.path = "queries"} : tensor<1x32x5x128xbf16>
    %8 = qc.attention %4, %5, %5 {scale = 5.000000e-01, qc.path = "batch"} : tensor<64x32x1x128xbf16>
    func.return %6, %7, %8 : tensor<1x32x1x128xbf16>, tensor<1x32x5x128xbf16>, tensor<64x32x1x128xbf16>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x32x1x128xbf16>, %1: tensor<1x8x8192x128xbf16>, %2: tensor<1x1xi64>, %3: tensor<1x32x5x128xbf16>, %4: tensor<64x32x1x128xbf16>, %5: tensor<64x8x8192x128xbf16>) -> (tensor<1x32x1x128xbf16>, tensor<1x32x5x128xbf16>, tensor<64x32x1x128xbf16>) {
// CHECK-NEXT:     %6 = qc.attention %0, %1, %1 last(%2) {scale = 5.000000e-01, window = 250, qc.path = "window"} : tensor<1x32x1x128xbf16>
// CHECK-NEXT:     %7 = qc.attention %3, %1, %1 {scale = 5.000000e-01, qc.path = "queries"} : tensor<1x32x5x128xbf16>
// CHECK-NEXT:     %8 = qc.attention %4, %5, %5 {scale = 5.000000e-01, qc.path = "batch"} : tensor<64x32x1x128xbf16>
// CHECK-NEXT:     func.return %6, %7, %8 : tensor<1x32x1x128xbf16>, tensor<1x32x5x128xbf16>, tensor<64x32x1x128xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

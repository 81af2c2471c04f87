// RUN: qc opt -p round-attention %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x2x5x4xbf16>, %1: tensor<1x2x5x4xf32>, %2: tensor<1x2x5x4xf16>) -> (tensor<1x2x5x4xbf16>, tensor<1x2x5x4xf32>) {
    %3 = qc.attention %0, %2, %2 {scale = 5.000000e-01, causal} : tensor<1x2x5x4xbf16>
    %4 = qc.attention %1, %1, %1 {scale = 5.000000e-01, causal} : tensor<1x2x5x4xf32>
    func.return %3, %4 : tensor<1x2x5x4xbf16>, tensor<1x2x5x4xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x2x5x4xbf16>, %1: tensor<1x2x5x4xf32>, %2: tensor<1x2x5x4xf16>) -> (tensor<1x2x5x4xbf16>, tensor<1x2x5x4xf32>) {
// CHECK-NEXT:     %3 = qc.attention %0, %2, %2 {scale = 5.000000e-01, causal, compute = "bf16"} : tensor<1x2x5x4xbf16>
// CHECK-NEXT:     %4 = qc.attention %1, %1, %1 {scale = 5.000000e-01, causal} : tensor<1x2x5x4xf32>
// CHECK-NEXT:     func.return %3, %4 : tensor<1x2x5x4xbf16>, tensor<1x2x5x4xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

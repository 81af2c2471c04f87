// RUN: qc opt -p round-attention{compute=exact} -p round-attention{compute=bf16} %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x2x5x4xf16>) -> tensor<1x2x5x4xf16> {
    %1 = qc.attention %0, %0, %0 {scale = 5.000000e-01} : tensor<1x2x5x4xf16>
    func.return %1 : tensor<1x2x5x4xf16>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x2x5x4xf16>) -> tensor<1x2x5x4xf16> {
// CHECK-NEXT:     %1 = qc.attention %0, %0, %0 {scale = 5.000000e-01} : tensor<1x2x5x4xf16>
// CHECK-NEXT:     func.return %1 : tensor<1x2x5x4xf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

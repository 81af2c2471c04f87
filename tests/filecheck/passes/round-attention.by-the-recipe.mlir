// RUN: qc opt -p round-attention{compute=int8} %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x2x5x4xf32>) -> tensor<1x2x5x4xf32> {
    %1 = qc.attention %0, %0, %0 {scale = 5.000000e-01} : tensor<1x2x5x4xf32>
    func.return %1 : tensor<1x2x5x4xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x2x5x4xf32>) -> tensor<1x2x5x4xf32> {
// CHECK-NEXT:     %1 = qc.attention %0, %0, %0 {scale = 5.000000e-01, compute = "bf16"} : tensor<1x2x5x4xf32>
// CHECK-NEXT:     func.return %1 : tensor<1x2x5x4xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

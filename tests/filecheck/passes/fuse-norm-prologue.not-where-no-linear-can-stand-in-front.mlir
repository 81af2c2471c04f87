// RUN: qc opt -p fuse-norm-prologue %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x8xf32>, %1: tensor<8x8xf32>) -> tensor<1x8xf32> {
    %2 = qc.rms_norm %0 {eps = 1.000000e-05} : tensor<1x8xf32>
    %3 = qc.softmax %2 {axis = 1} : tensor<1x8xf32>
    %4 = qc.linear %2, %1 extras(%3) : tensor<1x8xf32> {
    ^bb0(%5: f32, %6: f32):
      %7 = arith.addf %5, %6 : f32
      qc.yield %7
    }
    func.return %4 : tensor<1x8xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x8xf32>, %1: tensor<8x8xf32>) -> tensor<1x8xf32> {
// CHECK-NEXT:     %2 = qc.rms_norm %0 {eps = 1.000000e-05} : tensor<1x8xf32>
// CHECK-NEXT:     %3 = qc.softmax %2 {axis = 1} : tensor<1x8xf32>
// CHECK-NEXT:     %4 = qc.linear %2, %1 extras(%3) : tensor<1x8xf32> {
// CHECK-NEXT:     ^bb0(%5: f32, %6: f32):
// CHECK-NEXT:       %7 = arith.addf %5, %6 : f32
// CHECK-NEXT:       qc.yield %7
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %4 : tensor<1x8xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p fuse-norm-prologue %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x1x8xf32>) -> tensor<1x1x6xf32> {
    %1 = qc.const @g : tensor<8xf32>
    %2 = qc.rms_norm %0 weight(%1) {eps = 1.000000e-05, qc.path = "norm"} : tensor<1x1x8xf32>
    %3 = qc.const @w : tensor<6x8xf32>
    %4 = qc.linear %2, %3 {qc.path = "fc"} : tensor<1x1x6xf32> {
    ^bb0(%5: f32):
      %6 = math.tanh %5 : f32
      qc.yield %6
    }
    func.return %4 : tensor<1x1x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x1x8xf32>) -> tensor<1x1x6xf32> {
// CHECK-NEXT:     %1 = qc.const @g : tensor<8xf32>
// CHECK-NEXT:     %2 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %3 = qc.linear %0, %2 affine(%1) {qc.path = "fc"} : tensor<1x1x6xf32> prologue {
// CHECK-NEXT:     ^bb0(%4: tensor<1x1x8xf32>, %5: tensor<8xf32>):
// CHECK-NEXT:       %6 = qc.rms_norm %4 weight(%5) {eps = 1.000000e-05, qc.path = "norm"} : tensor<1x1x8xf32>
// CHECK-NEXT:       qc.yield %6
// CHECK-NEXT:     } {
// CHECK-NEXT:     ^bb0(%7: f32):
// CHECK-NEXT:       %8 = math.tanh %7 : f32
// CHECK-NEXT:       qc.yield %8
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %3 : tensor<1x1x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

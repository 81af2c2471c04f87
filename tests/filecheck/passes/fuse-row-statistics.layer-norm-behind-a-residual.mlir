// RUN: qc opt -p fuse-row-statistics{arch="sm_90a"} %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x9x8xf32>, %1: tensor<1x9x8xf32>) -> tensor<1x9x6xf32> {
    %2 = qc.const @v : tensor<8x8xf32>
    %3 = qc.linear %0, %2 extras(%1) {qc.path = "out"} : tensor<1x9x8xf32> {
    ^bb0(%4: f32, %5: f32):
      %6 = arith.addf %4, %5 : f32
      qc.yield %6
    }
    %7 = qc.const @g : tensor<8xf32>
    %8 = qc.const @b : tensor<8xf32>
    %9 = qc.layer_norm %3 weight(%7) bias(%8) {eps = 1.000000e-05, qc.path = "norm"} : tensor<1x9x8xf32>
    %10 = qc.const @w : tensor<6x8xf32>
    %11 = qc.linear %9, %10 {qc.path = "fc"} : tensor<1x9x6xf32>
    func.return %11 : tensor<1x9x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x9x8xf32>, %1: tensor<1x9x8xf32>) -> tensor<1x9x6xf32> {
// CHECK-NEXT:     %2 = qc.const @v : tensor<8x8xf32>
// CHECK-NEXT:     %3, %4 = qc.linear %0, %2 extras(%1) {statistics = "layer", qc.path = "out"} : tensor<1x9x8xf32>, tensor<1x9x2xf32> {
// CHECK-NEXT:     ^bb0(%5: f32, %6: f32):
// CHECK-NEXT:       %7 = arith.addf %5, %6 : f32
// CHECK-NEXT:       qc.yield %7
// CHECK-NEXT:     }
// CHECK-NEXT:     %8 = qc.const @g : tensor<8xf32>
// CHECK-NEXT:     %9 = qc.const @b : tensor<8xf32>
// CHECK-NEXT:     %10 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %11 = qc.linear %3, %10 affine(%8, %9, %4) {qc.path = "fc"} : tensor<1x9x6xf32> prologue {
// CHECK-NEXT:     ^bb0(%12: tensor<1x9x8xf32>, %13: tensor<8xf32>, %14: tensor<8xf32>, %15: tensor<1x9x2xf32>):
// CHECK-NEXT:       %16 = qc.layer_norm %12 weight(%13) bias(%14) statistics(%15) {eps = 1.000000e-05, qc.path = "norm"} : tensor<1x9x8xf32>
// CHECK-NEXT:       qc.yield %16
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %11 : tensor<1x9x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

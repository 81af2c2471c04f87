// RUN: qc opt -p fuse-norm-prologue %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x8xf32>, %1: tensor<1x8xf32>) -> (tensor<1x6xf32>, tensor<1x8xf32>) {
    %2 = qc.rms_norm %0 {eps = 1.000000e-05} : tensor<1x8xf32>
    %3 = tensor.empty() : tensor<1x8xf32>
    %4 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%1, %2 : tensor<1x8xf32>, tensor<1x8xf32>) outs(%3 : tensor<1x8xf32>) {
    ^bb0(%5: f32, %6: f32, %7: f32):
      %8 = arith.addf %5, %6 : f32
      linalg.yield %8 : f32
    } -> tensor<1x8xf32>
    %9 = qc.rms_norm %4 {eps = 1.000000e-05} : tensor<1x8xf32>
    %10 = qc.const @w : tensor<6x8xf32>
    %11 = qc.linear %9, %10 : tensor<1x6xf32>
    func.return %11, %4 : tensor<1x6xf32>, tensor<1x8xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x8xf32>, %1: tensor<1x8xf32>) -> (tensor<1x6xf32>, tensor<1x8xf32>) {
// CHECK-NEXT:     %2 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %3, %4 = qc.linear %0, %2 affine(%1) : tensor<1x6xf32>, tensor<1x8xf32> prologue {
// CHECK-NEXT:     ^bb0(%5: tensor<1x8xf32>, %6: tensor<1x8xf32>):
// CHECK-NEXT:       %7 = qc.rms_norm %5 residual(%6) {eps = 1.000000e-05} : tensor<1x8xf32>
// CHECK-NEXT:       %8 = qc.rms_norm %7 {eps = 1.000000e-05} : tensor<1x8xf32>
// CHECK-NEXT:       qc.yield %8, %7
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %3, %4 : tensor<1x6xf32>, tensor<1x8xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

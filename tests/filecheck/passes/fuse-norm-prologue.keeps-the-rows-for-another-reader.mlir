// RUN: qc opt -p fuse-norm-prologue %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x8xf32>) -> (tensor<1x6xf32>, tensor<1x6xf32>) {
    %1 = qc.rms_norm %0 {eps = 1.000000e-05} : tensor<1x8xf32>
    %2 = qc.const @w : tensor<6x8xf32>
    %3 = qc.linear %1, %2 : tensor<1x6xf32>
    %4 = qc.const @v : tensor<6x8xf32>
    %5 = qc.linear %1, %4 : tensor<1x6xf32>
    func.return %3, %5 : tensor<1x6xf32>, tensor<1x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x8xf32>) -> (tensor<1x6xf32>, tensor<1x6xf32>) {
// CHECK-NEXT:     %1 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %2, %3 = qc.linear %0, %1 : tensor<1x6xf32>, tensor<1x8xf32> prologue {
// CHECK-NEXT:     ^bb0(%4: tensor<1x8xf32>):
// CHECK-NEXT:       %5 = qc.rms_norm %4 {eps = 1.000000e-05} : tensor<1x8xf32>
// CHECK-NEXT:       qc.yield %5, %5
// CHECK-NEXT:     }
// CHECK-NEXT:     %6 = qc.const @v : tensor<6x8xf32>
// CHECK-NEXT:     %7 = qc.linear %3, %6 : tensor<1x6xf32>
// CHECK-NEXT:     func.return %2, %7 : tensor<1x6xf32>, tensor<1x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

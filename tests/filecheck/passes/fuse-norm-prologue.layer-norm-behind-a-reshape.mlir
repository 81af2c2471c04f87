// RUN: qc opt -p fuse-norm-prologue %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x3x8xbf16>) -> tensor<3x6xbf16> {
    %1 = qc.const @g : tensor<8xbf16>
    %2 = qc.const @b : tensor<8xbf16>
    %3 = qc.layer_norm %0 weight(%1) bias(%2) {eps = 1.000000e-05} : tensor<1x3x8xbf16>
    %4 = tensor.collapse_shape %3 [[0 : i64, 1 : i64], [2 : i64]] : tensor<1x3x8xbf16> into tensor<3x8xbf16>
    %5 = qc.const @w : tensor<6x8xbf16>
    %6 = qc.linear %4, %5 : tensor<3x6xbf16>
    func.return %6 : tensor<3x6xbf16>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x3x8xbf16>) -> tensor<3x6xbf16> {
// CHECK-NEXT:     %1 = qc.const @g : tensor<8xbf16>
// CHECK-NEXT:     %2 = qc.const @b : tensor<8xbf16>
// CHECK-NEXT:     %3 = qc.const @w : tensor<6x8xbf16>
// CHECK-NEXT:     %4 = tensor.collapse_shape %0 [[0 : i64, 1 : i64], [2 : i64]] : tensor<1x3x8xbf16> into tensor<3x8xbf16>
// CHECK-NEXT:     %5 = qc.linear %4, %3 affine(%1, %2) : tensor<3x6xbf16> prologue {
// CHECK-NEXT:     ^bb0(%6: tensor<3x8xbf16>, %7: tensor<8xbf16>, %8: tensor<8xbf16>):
// CHECK-NEXT:       %9 = qc.layer_norm %6 weight(%7) bias(%8) {eps = 1.000000e-05} : tensor<3x8xbf16>
// CHECK-NEXT:       qc.yield %9
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %5 : tensor<3x6xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

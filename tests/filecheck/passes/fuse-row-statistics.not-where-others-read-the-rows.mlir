// RUN: qc opt -p fuse-row-statistics{arch="sm_90a"} %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<9x8xf32>) -> (tensor<9x6xf32>, tensor<9x8xf32>) {
    %1 = qc.const @v : tensor<8x8xf32>
    %2 = qc.linear %0, %1 {qc.path = "out"} : tensor<9x8xf32>
    %3 = qc.rms_norm %2 {eps = 1.000000e-05, qc.path = "norm"} : tensor<9x8xf32>
    %4 = qc.const @w : tensor<6x8xf32>
    %5 = qc.linear %3, %4 {qc.path = "fc"} : tensor<9x6xf32>
    func.return %5, %3 : tensor<9x6xf32>, tensor<9x8xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<9x8xf32>) -> (tensor<9x6xf32>, tensor<9x8xf32>) {
// CHECK-NEXT:     %1 = qc.const @v : tensor<8x8xf32>
// CHECK-NEXT:     %2 = qc.linear %0, %1 {qc.path = "out"} : tensor<9x8xf32>
// CHECK-NEXT:     %3 = qc.rms_norm %2 {eps = 1.000000e-05, qc.path = "norm"} : tensor<9x8xf32>
// CHECK-NEXT:     %4 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %5 = qc.linear %3, %4 {qc.path = "fc"} : tensor<9x6xf32>
// CHECK-NEXT:     func.return %5, %3 : tensor<9x6xf32>, tensor<9x8xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p fuse-norm-prologue %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.rms_norm %0 {eps = 1.000000e-05} : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %2 = qc.const @w : tensor<6x8xf32>
    %3 = qc.linear %1, %2 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    func.return %3 : tensor<?x6xf32, #qc.dims<["s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.rms_norm %0 {eps = 1.000000e-05} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %2 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %3 = qc.linear %1, %2 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:     func.return %3 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

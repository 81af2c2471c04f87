// RUN: qc opt -p fold-views -p dce %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<2x?x8xf32, #qc.dims<[2, "s", 8]>>) -> tensor<2x?x6xf32, #qc.dims<[2, "s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = tensor.collapse_shape %0 [[0 : i64, 1 : i64], [2 : i64]] : tensor<2x?x8xf32, #qc.dims<[2, "s", 8]>> into tensor<?x8xf32, #qc.dims<["2*s", 8]>>
    %2 = qc.const @w : tensor<6x8xf32>
    %3 = qc.linear %1, %2 : tensor<?x6xf32, #qc.dims<["2*s", 6]>>
    %4 = qc.dim "s" : index
    %5 = tensor.expand_shape %3 [[0 : i64, 1 : i64], [2 : i64]] output_shape [2, %4, 6] : tensor<?x6xf32, #qc.dims<["2*s", 6]>> into tensor<2x?x6xf32, #qc.dims<[2, "s", 6]>>
    func.return %5 : tensor<2x?x6xf32, #qc.dims<[2, "s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<2x?x8xf32, #qc.dims<[2, "s", 8]>>) -> tensor<2x?x6xf32, #qc.dims<[2, "s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %2 = qc.linear %0, %1 : tensor<2x?x6xf32, #qc.dims<[2, "s", 6]>>
// CHECK-NEXT:     func.return %2 : tensor<2x?x6xf32, #qc.dims<[2, "s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

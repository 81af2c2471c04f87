// RUN: qc opt -p fold-views -p dce %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<?x2x3xf32, #qc.dims<["s", 2, 3]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @w : tensor<6x8xf32>
    %2 = qc.linear %0, %1 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    %3 = qc.dim "s" : index
    %4 = tensor.expand_shape %2 [[0 : i64], [1 : i64, 2 : i64]] output_shape [%3, 2, 3] : tensor<?x6xf32, #qc.dims<["s", 6]>> into tensor<?x2x3xf32, #qc.dims<["s", 2, 3]>>
    func.return %4, %2 : tensor<?x2x3xf32, #qc.dims<["s", 2, 3]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<?x2x3xf32, #qc.dims<["s", 2, 3]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @w : tensor<6x8xf32>
// CHECK-NEXT:     %2 = qc.linear %0, %1 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:     %3 = qc.dim "s" : index
// CHECK-NEXT:     %4 = tensor.expand_shape %2 [[0 : i64], [1 : i64, 2 : i64]] output_shape [%3, 2, 3] : tensor<?x6xf32, #qc.dims<["s", 6]>> into tensor<?x2x3xf32, #qc.dims<["s", 2, 3]>>
// CHECK-NEXT:     func.return %4, %2 : tensor<?x2x3xf32, #qc.dims<["s", 2, 3]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

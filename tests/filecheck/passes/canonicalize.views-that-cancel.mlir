// RUN: qc opt -p canonicalize %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = tensor.empty(%1) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %3 = linalg.transpose ins(%0:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%2:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
    %4 = tensor.empty(%1) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %5 = linalg.transpose ins(%3:tensor<8x?xf32, #qc.dims<[8, "s"]>>) outs(%4:tensor<?x8xf32, #qc.dims<["s", 8]>>) permutation = [1, 0]
    %6 = tensor.collapse_shape %5 [[0, 1]] : tensor<?x8xf32, #qc.dims<["s", 8]>> into tensor<?xf32, #qc.dims<["8*s"]>>
    %7 = tensor.expand_shape %6 [[0, 1, 2]] output_shape [%1, 2, 4] : tensor<?xf32, #qc.dims<["8*s"]>> into tensor<?x2x4xf32, #qc.dims<["s", 2, 4]>>
    %8 = tensor.collapse_shape %7 [[0], [1, 2]] : tensor<?x2x4xf32, #qc.dims<["s", 2, 4]>> into tensor<?x8xf32, #qc.dims<["s", 8]>>
    %r = qc.softmax %8 {axis = 1, qc.path = "head"} : tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %r = qc.softmax %0 {axis = 1, qc.path = "head"} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p cse %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<8x8xf32>, tensor<8x8xf32>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = qc.dim "s" : index
    %3 = tensor.empty(%1) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %4 = tensor.empty(%2) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %5 = linalg.transpose ins(%0:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%3:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
    %6 = linalg.transpose ins(%0:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%4:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
    %7 = qc.softmax %5 {axis = 0, qc.path = "left"} : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %8 = qc.softmax %6 {axis = 0, qc.path = "right"} : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %r = qc.batch_matmul %7, %0 : tensor<8x8xf32>
    %9 = qc.batch_matmul %8, %0 : tensor<8x8xf32>
    func.return %r, %9 : tensor<8x8xf32>, tensor<8x8xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<8x8xf32>, tensor<8x8xf32>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.dim "s" : index
// CHECK-NEXT:     %2 = tensor.empty(%1) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
// CHECK-NEXT:     %3 = linalg.transpose ins(%0:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%2:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
// CHECK-NEXT:     %4 = qc.softmax %3 {axis = 0, qc.path = "left"} : tensor<8x?xf32, #qc.dims<[8, "s"]>>
// CHECK-NEXT:     %r = qc.batch_matmul %4, %0 : tensor<8x8xf32>
// CHECK-NEXT:     func.return %r, %r : tensor<8x8xf32>, tensor<8x8xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

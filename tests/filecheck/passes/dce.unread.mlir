// RUN: qc opt -p dce %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = tensor.empty(%1) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %3 = linalg.transpose ins(%0:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%2:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
    %4 = qc.state @kv : tensor<4x8xf32>
    %r = qc.softmax %0 {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %r = qc.softmax %0 {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p cse %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.softmax %0 {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %2 = qc.softmax %0 {axis = 0} : tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %1, %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.softmax %0 {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %2 = qc.softmax %0 {axis = 0} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %1, %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

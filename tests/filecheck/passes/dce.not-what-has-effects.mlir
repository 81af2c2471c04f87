// RUN: qc opt -p dce %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.state @kv : tensor<4x8xf32>
    %2 = qc.softmax %1 {axis = 1} : tensor<4x8xf32>
    qc.state_update @kv %2
    %3 = qc.torch_call "aten.foo.default" %0 {region = {inputs = 1 : i64, ops = [{target = "aten.foo.default", args = [{v = 0 : i64}]}], outputs = [1 : i64]}, sizes = []} : tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %0 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.state @kv : tensor<4x8xf32>
// CHECK-NEXT:     %2 = qc.softmax %1 {axis = 1} : tensor<4x8xf32>
// CHECK-NEXT:     qc.state_update @kv %2
// CHECK-NEXT:     func.return %0 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

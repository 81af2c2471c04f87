// RUN: qc opt -p fuse-routing %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<3x8xbf16>) -> (tensor<3x2xbf16>, tensor<3x2xi64>) {
    %1, %2 = qc.topk %0 {k = 2, axis = 1, qc.path = "router"} : tensor<3x2xbf16>, tensor<3x2xi64>
    %3 = qc.softmax %1 {axis = 1, qc.path = "router"} : tensor<3x2xbf16>
    func.return %3, %2 : tensor<3x2xbf16>, tensor<3x2xi64>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<3x8xbf16>) -> (tensor<3x2xbf16>, tensor<3x2xi64>) {
// CHECK-NEXT:     %1, %2 = qc.route %0 {k = 2, scores = "chosen", qc.path = "router"} : tensor<3x2xbf16>, tensor<3x2xi64>
// CHECK-NEXT:     func.return %1, %2 : tensor<3x2xbf16>, tensor<3x2xi64>
// CHECK-NEXT:   }
// CHECK-NEXT: }

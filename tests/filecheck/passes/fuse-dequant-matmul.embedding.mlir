// RUN: qc opt -p fuse-dequant-matmul %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?xi64, #qc.dims<["s"]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %2 = qc.dequantize %1 : tensor<6x8xf32>
    %3 = qc.embedding %0, %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %3 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?xi64, #qc.dims<["s"]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %2 = qc.embedding %0, %1 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

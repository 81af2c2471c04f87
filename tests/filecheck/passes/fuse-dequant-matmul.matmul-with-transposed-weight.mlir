// RUN: qc opt -p fuse-dequant-matmul %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %2 = qc.dequantize %1 : tensor<6x8xf32>
    %3 = tensor.empty() : tensor<8x6xf32>
    %4 = linalg.transpose ins(%2:tensor<6x8xf32>) outs(%3:tensor<8x6xf32>) permutation = [1, 0]
    %5 = qc.batch_matmul %0, %4 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    func.return %5 : tensor<?x6xf32, #qc.dims<["s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %2 = qc.linear %0, %1 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:     func.return %2 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

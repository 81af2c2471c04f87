// RUN: qc opt -p pull-slices %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<4x8xf32>) -> tensor<1x6xf32> {
    %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %2 = qc.linear %0, %1 : tensor<4x6xf32>
    %3 = tensor.extract_slice %2[3, 0] [1, 6] [1, 1] : tensor<4x6xf32> to tensor<1x6xf32>
    func.return %3 : tensor<1x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<4x8xf32>) -> tensor<1x6xf32> {
// CHECK-NEXT:     %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %2 = tensor.extract_slice %0[3, 0] [1, 8] [1, 1] : tensor<4x8xf32> to tensor<1x8xf32>
// CHECK-NEXT:     %3 = qc.linear %2, %1 : tensor<1x6xf32>
// CHECK-NEXT:     func.return %3 : tensor<1x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

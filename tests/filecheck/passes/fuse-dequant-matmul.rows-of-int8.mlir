// RUN: qc opt -p fuse-dequant-matmul %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x96xi8, #qc.dims<["s", 96]>>) -> (tensor<?x6xf32, #qc.dims<["s", 6]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @w : !qc.qtensor<6x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %2 = qc.const @v : !qc.qtensor<6x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
    %3 = qc.dequantize %1 : tensor<6x64xf32>
    %4 = qc.dequantize %2 : tensor<6x64xf32>
    %5 = qc.dequantize_rows %0 : tensor<?x64xf32, #qc.dims<["s", 64]>>
    %6 = qc.linear %5, %3 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    %7 = qc.linear %5, %4 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    func.return %6, %7 : tensor<?x6xf32, #qc.dims<["s", 6]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x96xi8, #qc.dims<["s", 96]>>) -> (tensor<?x6xf32, #qc.dims<["s", 6]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @w : !qc.qtensor<6x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %2 = qc.const @v : !qc.qtensor<6x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %3 = qc.dequantize_rows %0 : tensor<?x64xf32, #qc.dims<["s", 64]>>
// CHECK-NEXT:     %4 = qc.linear %0, %1 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:     %5 = qc.linear %3, %2 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:     func.return %4, %5 : tensor<?x6xf32, #qc.dims<["s", 6]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

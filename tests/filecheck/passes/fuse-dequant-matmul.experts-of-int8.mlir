// RUN: qc opt -p fuse-dequant-matmul %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x96xi8, #qc.dims<["s", 96]>>, %1: tensor<?xi64, #qc.dims<["2*s"]>>) -> (tensor<?x3xf32, #qc.dims<["2*s", 3]>>, tensor<?x3xf32, #qc.dims<["2*s", 3]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %2 = qc.const @w : !qc.qtensor<6x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %3 = qc.const @v : !qc.qtensor<6x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
    %4 = qc.dequantize %2 : tensor<6x64xf32>
    %5 = qc.dequantize %3 : tensor<6x64xf32>
    %6 = qc.dequantize_rows %0 : tensor<?x64xf32, #qc.dims<["s", 64]>>
    %7 = qc.grouped_linear %6, %4, %1 {experts = 2, repeat = 2} : tensor<?x3xf32, #qc.dims<["2*s", 3]>>
    %8 = qc.grouped_linear %6, %5, %1 {experts = 2, repeat = 2} : tensor<?x3xf32, #qc.dims<["2*s", 3]>>
    func.return %7, %8 : tensor<?x3xf32, #qc.dims<["2*s", 3]>>, tensor<?x3xf32, #qc.dims<["2*s", 3]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x96xi8, #qc.dims<["s", 96]>>, %1: tensor<?xi64, #qc.dims<["2*s"]>>) -> (tensor<?x3xf32, #qc.dims<["2*s", 3]>>, tensor<?x3xf32, #qc.dims<["2*s", 3]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %2 = qc.const @w : !qc.qtensor<6x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %3 = qc.const @v : !qc.qtensor<6x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %4 = qc.dequantize_rows %0 : tensor<?x64xf32, #qc.dims<["s", 64]>>
// CHECK-NEXT:     %5 = qc.grouped_linear %0, %2, %1 {experts = 2, repeat = 2} : tensor<?x3xf32, #qc.dims<["2*s", 3]>>
// CHECK-NEXT:     %6 = qc.grouped_linear %4, %3, %1 {experts = 2, repeat = 2} : tensor<?x3xf32, #qc.dims<["2*s", 3]>>
// CHECK-NEXT:     func.return %5, %6 : tensor<?x3xf32, #qc.dims<["2*s", 3]>>, tensor<?x3xf32, #qc.dims<["2*s", 3]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p fuse-dequant-matmul %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<2x30x96xi8>) -> (tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>) {
    %1 = qc.const @w : !qc.qtensor<6x576xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %2 = qc.const @v : !qc.qtensor<6x576xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
    %3 = qc.dequantize %1 : tensor<6x576xf32>
    %4 = qc.dequantize %2 : tensor<6x576xf32>
    %5 = qc.dequantize_rows %0 : tensor<2x30x64xf32>
    %6 = tensor.expand_shape %5 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] output_shape [2, 5, 6, 64] : tensor<2x30x64xf32> into tensor<2x5x6x64xf32>
    %7 = qc.windows %6 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
    %8 = qc.linear %7, %3 : tensor<2x5x6x6xf32>
    %9 = qc.windows %6 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
    %10 = qc.linear %9, %4 : tensor<2x5x6x6xf32>
    func.return %8, %10 : tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<2x30x96xi8>) -> (tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>) {
// CHECK-NEXT:     %1 = qc.const @w : !qc.qtensor<6x576xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %2 = qc.const @v : !qc.qtensor<6x576xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %3 = qc.dequantize_rows %0 : tensor<2x30x64xf32>
// CHECK-NEXT:     %4 = tensor.expand_shape %3 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] output_shape [2, 5, 6, 64] : tensor<2x30x64xf32> into tensor<2x5x6x64xf32>
// CHECK-NEXT:     %5 = tensor.expand_shape %0 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] output_shape [2, 5, 6, 96] : tensor<2x30x96xi8> into tensor<2x5x6x96xi8>
// CHECK-NEXT:     %6 = qc.windows %5 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, channels = 64} : tensor<2x5x6x640xi8>
// CHECK-NEXT:     %7 = qc.linear %6, %1 : tensor<2x5x6x6xf32>
// CHECK-NEXT:     %8 = qc.windows %4 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
// CHECK-NEXT:     %9 = qc.linear %8, %2 : tensor<2x5x6x6xf32>
// CHECK-NEXT:     func.return %7, %9 : tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

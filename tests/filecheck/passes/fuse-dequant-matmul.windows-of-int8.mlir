// RUN: qc opt -p fuse-dequant-matmul %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<2x5x6x64xf32>, %1: tensor<2xf32>) -> (tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<1x10x6x6xf32>) {
    %2 = qc.const @w : !qc.qtensor<6x576xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %3 = qc.const @v : !qc.qtensor<6x576xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
    %4 = qc.dequantize %2 : tensor<6x576xf32>
    %5 = qc.dequantize %3 : tensor<6x576xf32>
    %6 = tensor.collapse_shape %0 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] : tensor<2x5x6x64xf32> into tensor<2x30x64xf32>
    %7 = qc.quantize_rows %6 largest(%1) {kind = "image", value = 0.000000e+00} : tensor<2x30x96xi8>
    %8 = qc.dequantize_rows %7 : tensor<2x30x64xf32>
    %9 = tensor.expand_shape %8 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] output_shape [2, 5, 6, 64] : tensor<2x30x64xf32> into tensor<2x5x6x64xf32>
    %10 = qc.windows %9 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
    %11 = qc.linear %10, %4 : tensor<2x5x6x6xf32>
    %12 = qc.windows %9 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
    %13 = qc.linear %12, %5 : tensor<2x5x6x6xf32>
    %14 = qc.quantize_rows %0 {kind = "token", value = 0.000000e+00} : tensor<2x5x6x96xi8>
    %15 = qc.dequantize_rows %14 : tensor<2x5x6x64xf32>
    %16 = qc.windows %15 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
    %17 = qc.linear %16, %4 : tensor<2x5x6x6xf32>
    %18 = tensor.collapse_shape %8 [[0 : i64, 1 : i64], [2 : i64]] : tensor<2x30x64xf32> into tensor<60x64xf32>
    %19 = tensor.expand_shape %18 [[0 : i64, 1 : i64, 2 : i64], [3 : i64]] output_shape [1, 10, 6, 64] : tensor<60x64xf32> into tensor<1x10x6x64xf32>
    %20 = qc.windows %19 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<1x10x6x576xf32>
    %21 = qc.linear %20, %4 : tensor<1x10x6x6xf32>
    func.return %11, %13, %17, %21 : tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<1x10x6x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<2x5x6x64xf32>, %1: tensor<2xf32>) -> (tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<1x10x6x6xf32>) {
// CHECK-NEXT:     %2 = qc.const @w : !qc.qtensor<6x576xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %3 = qc.const @v : !qc.qtensor<6x576xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %4 = tensor.collapse_shape %0 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] : tensor<2x5x6x64xf32> into tensor<2x30x64xf32>
// CHECK-NEXT:     %5 = qc.quantize_rows %4 largest(%1) {kind = "image", value = 0.000000e+00} : tensor<2x30x96xi8>
// CHECK-NEXT:     %6 = qc.dequantize_rows %5 : tensor<2x30x64xf32>
// CHECK-NEXT:     %7 = tensor.expand_shape %6 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] output_shape [2, 5, 6, 64] : tensor<2x30x64xf32> into tensor<2x5x6x64xf32>
// CHECK-NEXT:     %8 = tensor.expand_shape %5 [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] output_shape [2, 5, 6, 96] : tensor<2x30x96xi8> into tensor<2x5x6x96xi8>
// CHECK-NEXT:     %9 = qc.windows %8 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, channels = 64} : tensor<2x5x6x640xi8>
// CHECK-NEXT:     %10 = qc.linear %9, %2 : tensor<2x5x6x6xf32>
// CHECK-NEXT:     %11 = qc.windows %7 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
// CHECK-NEXT:     %12 = qc.linear %11, %3 : tensor<2x5x6x6xf32>
// CHECK-NEXT:     %13 = qc.quantize_rows %0 {kind = "token", value = 0.000000e+00} : tensor<2x5x6x96xi8>
// CHECK-NEXT:     %14 = qc.dequantize_rows %13 : tensor<2x5x6x64xf32>
// CHECK-NEXT:     %15 = qc.windows %14 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<2x5x6x576xf32>
// CHECK-NEXT:     %16 = qc.linear %15, %2 : tensor<2x5x6x6xf32>
// CHECK-NEXT:     %17 = tensor.collapse_shape %6 [[0 : i64, 1 : i64], [2 : i64]] : tensor<2x30x64xf32> into tensor<60x64xf32>
// CHECK-NEXT:     %18 = tensor.expand_shape %17 [[0 : i64, 1 : i64, 2 : i64], [3 : i64]] output_shape [1, 10, 6, 64] : tensor<60x64xf32> into tensor<1x10x6x64xf32>
// CHECK-NEXT:     %19 = qc.windows %18 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>} : tensor<1x10x6x576xf32>
// CHECK-NEXT:     %20 = qc.linear %19, %2 : tensor<1x10x6x6xf32>
// CHECK-NEXT:     func.return %10, %12, %16, %20 : tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<2x5x6x6xf32>, tensor<1x10x6x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

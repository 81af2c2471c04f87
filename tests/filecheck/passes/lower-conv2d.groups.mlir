// RUN: qc opt -p lower-conv2d -p fold-views -p dce %s | filecheck %s
builtin.module {
  func.func @main(%x: tensor<2x8x6x6xbf16>) -> (tensor<2x8x6x6xbf16>, tensor<2x4x4x4xbf16>) {
    %each = qc.const @depthwise.weight : tensor<8x1x3x3xbf16>
    %bias = qc.const @depthwise.bias : tensor<8xbf16>
    %two = qc.const @grouped.weight : tensor<4x4x3x3xbf16>
    %y = qc.conv2d %x, %each bias(%bias) {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 8, qc.path = "depthwise"} : tensor<2x8x6x6xbf16>
    %z = qc.conv2d %x, %two {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>, groups = 2, qc.path = "grouped"} : tensor<2x4x4x4xbf16>
    func.return %y, %z : tensor<2x8x6x6xbf16>, tensor<2x4x4x4xbf16>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%x: tensor<2x8x6x6xbf16>) -> (tensor<2x8x6x6xbf16>, tensor<2x4x4x4xbf16>) {
// CHECK-NEXT:     %each = qc.const @depthwise.weight : tensor<8x1x3x3xbf16>
// CHECK-NEXT:     %bias = qc.const @depthwise.bias : tensor<8xbf16>
// CHECK-NEXT:     %two = qc.const @grouped.weight : tensor<4x4x3x3xbf16>
// CHECK-NEXT:     %0 = tensor.empty() : tensor<2x6x6x8xbf16>
// CHECK-NEXT:     %1 = linalg.transpose ins(%x:tensor<2x8x6x6xbf16>) outs(%0:tensor<2x6x6x8xbf16>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %2 = arith.constant 0.000000e+00 : bf16
// CHECK-NEXT:     %3 = tensor.empty() : tensor<2x8x8x8xbf16>
// CHECK-NEXT:     %4 = linalg.fill {qc.path = "depthwise"} ins(%2 : bf16) outs(%3 : tensor<2x8x8x8xbf16>) -> tensor<2x8x8x8xbf16>
// CHECK-NEXT:     %5 = tensor.insert_slice %1 into %4[0, 1, 1, 0] [2, 6, 6, 8] [1, 1, 1, 1] {qc.path = "depthwise"} : tensor<2x6x6x8xbf16> into tensor<2x8x8x8xbf16>
// CHECK-NEXT:     %6 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:     %7 = tensor.empty() : tensor<2x6x6x8x1xf32>
// CHECK-NEXT:     %8 = linalg.fill {qc.path = "depthwise"} ins(%6 : f32) outs(%7 : tensor<2x6x6x8x1xf32>) -> tensor<2x6x6x8x1xf32>
// CHECK-NEXT:     %9 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, (d1 + d5), (d2 + d6), d3)>, affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d3, 0, d5, d6)>, affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, d1, d2, d3, d4)>], iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel", "reduction", "reduction"]} ins(%5, %each : tensor<2x8x8x8xbf16>, tensor<8x1x3x3xbf16>) outs(%8 : tensor<2x6x6x8x1xf32>) attrs =  {qc.path = "depthwise"} {
// CHECK-NEXT:     ^bb0(%10: bf16, %11: bf16, %12: f32):
// CHECK-NEXT:       %13 = arith.extf %10 : bf16 to f32
// CHECK-NEXT:       %14 = arith.extf %11 : bf16 to f32
// CHECK-NEXT:       %15 = arith.mulf %13, %14 : f32
// CHECK-NEXT:       %16 = arith.addf %12, %15 : f32
// CHECK-NEXT:       linalg.yield %16 : f32
// CHECK-NEXT:     } -> tensor<2x6x6x8x1xf32>
// CHECK-NEXT:     %17 = tensor.empty() : tensor<2x6x6x8xbf16>
// CHECK-NEXT:     %18 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3, 0)>, affine_map<(d0, d1, d2, d3) -> (d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%9, %bias : tensor<2x6x6x8x1xf32>, tensor<8xbf16>) outs(%17 : tensor<2x6x6x8xbf16>) attrs =  {qc.path = "depthwise"} {
// CHECK-NEXT:     ^bb0(%19: f32, %20: bf16, %21: bf16):
// CHECK-NEXT:       %22 = arith.extf %20 : bf16 to f32
// CHECK-NEXT:       %23 = arith.addf %19, %22 : f32
// CHECK-NEXT:       %24 = arith.truncf %23 : f32 to bf16
// CHECK-NEXT:       linalg.yield %24 : bf16
// CHECK-NEXT:     } -> tensor<2x6x6x8xbf16>
// CHECK-NEXT:     %25 = tensor.empty() : tensor<2x8x6x6xbf16>
// CHECK-NEXT:     %y = linalg.transpose ins(%18:tensor<2x6x6x8xbf16>) outs(%25:tensor<2x8x6x6xbf16>) permutation = [0, 3, 1, 2]
// CHECK-NEXT:     %26 = tensor.empty() : tensor<2x6x6x8xbf16>
// CHECK-NEXT:     %27 = linalg.transpose ins(%x:tensor<2x8x6x6xbf16>) outs(%26:tensor<2x6x6x8xbf16>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %28 = tensor.expand_shape %27 [[0 : i64], [1 : i64], [2 : i64], [3 : i64, 4 : i64]] output_shape [2, 6, 6, 2, 4] {qc.path = "grouped"} : tensor<2x6x6x8xbf16> into tensor<2x6x6x2x4xbf16>
// CHECK-NEXT:     %29 = tensor.empty() : tensor<2x2x4x4x3x3x4xbf16>
// CHECK-NEXT:     %30 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d1, (d2 + d4), (d3 + d5), d0, d6)>, affine_map<(d0, d1, d2, d3, d4, d5, d6) -> (d0, d1, d2, d3, d4, d5, d6)>], iterator_types = ["parallel", "parallel", "parallel", "parallel", "parallel", "parallel", "parallel"]} ins(%28 : tensor<2x6x6x2x4xbf16>) outs(%29 : tensor<2x2x4x4x3x3x4xbf16>) attrs =  {qc.path = "grouped"} {
// CHECK-NEXT:     ^bb0(%31: bf16, %32: bf16):
// CHECK-NEXT:       linalg.yield %31 : bf16
// CHECK-NEXT:     } -> tensor<2x2x4x4x3x3x4xbf16>
// CHECK-NEXT:     %33 = tensor.collapse_shape %30 [[0 : i64], [1 : i64, 2 : i64, 3 : i64], [4 : i64, 5 : i64, 6 : i64]] {qc.path = "grouped"} : tensor<2x2x4x4x3x3x4xbf16> into tensor<2x32x36xbf16>
// CHECK-NEXT:     %34 = tensor.expand_shape %two [[0 : i64, 1 : i64], [2 : i64], [3 : i64], [4 : i64]] output_shape [2, 2, 4, 3, 3] {qc.path = "grouped"} : tensor<4x4x3x3xbf16> into tensor<2x2x4x3x3xbf16>
// CHECK-NEXT:     %35 = tensor.empty() : tensor<2x3x3x4x2xbf16>
// CHECK-NEXT:     %36 = linalg.transpose ins(%34:tensor<2x2x4x3x3xbf16>) outs(%35:tensor<2x3x3x4x2xbf16>) permutation = [0, 3, 4, 2, 1]
// CHECK-NEXT:     %37 = tensor.collapse_shape %36 [[0 : i64], [1 : i64, 2 : i64, 3 : i64], [4 : i64]] {qc.path = "grouped"} : tensor<2x3x3x4x2xbf16> into tensor<2x36x2xbf16>
// CHECK-NEXT:     %38 = qc.batch_matmul %33, %37 {qc.path = "grouped"} : tensor<2x32x2xf32>
// CHECK-NEXT:     %39 = tensor.empty() : tensor<32x2x2xf32>
// CHECK-NEXT:     %40 = linalg.transpose ins(%38:tensor<2x32x2xf32>) outs(%39:tensor<32x2x2xf32>) permutation = [1, 0, 2]
// CHECK-NEXT:     %41 = tensor.collapse_shape %40 [[0 : i64], [1 : i64, 2 : i64]] {qc.path = "grouped"} : tensor<32x2x2xf32> into tensor<32x4xf32>
// CHECK-NEXT:     %42 = tensor.expand_shape %41 [[0 : i64, 1 : i64, 2 : i64], [3 : i64]] output_shape [2, 4, 4, 4] {qc.path = "grouped"} : tensor<32x4xf32> into tensor<2x4x4x4xf32>
// CHECK-NEXT:     %43 = tensor.empty() : tensor<2x4x4x4xbf16>
// CHECK-NEXT:     %44 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%42 : tensor<2x4x4x4xf32>) outs(%43 : tensor<2x4x4x4xbf16>) attrs =  {qc.path = "grouped"} {
// CHECK-NEXT:     ^bb0(%45: f32, %46: bf16):
// CHECK-NEXT:       %47 = arith.truncf %45 : f32 to bf16
// CHECK-NEXT:       linalg.yield %47 : bf16
// CHECK-NEXT:     } -> tensor<2x4x4x4xbf16>
// CHECK-NEXT:     %48 = tensor.empty() : tensor<2x4x4x4xbf16>
// CHECK-NEXT:     %z = linalg.transpose ins(%44:tensor<2x4x4x4xbf16>) outs(%48:tensor<2x4x4x4xbf16>) permutation = [0, 3, 1, 2]
// CHECK-NEXT:     func.return %y, %z : tensor<2x8x6x6xbf16>, tensor<2x4x4x4xbf16>
// CHECK-NEXT:   }
// CHECK-NEXT: }

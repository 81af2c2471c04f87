// RUN: qc opt -p lower-conv2d -p fold-views -p dce %s | filecheck %s
builtin.module {
  func.func @main(%x: tensor<2x8x6x6xf32>) -> (tensor<2x16x6x6xf32>, tensor<2x16x6x6xf32>) {
    %w = qc.const @taps.weight : tensor<16x8x3x3xbf16>
    %p = qc.const @point.weight : tensor<16x8x1x1xbf16>
    %y = qc.conv2d %x, %w {strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 1, qc.path = "taps"} : tensor<2x16x6x6xf32>
    %z = qc.conv2d %x, %p {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>, groups = 1, qc.path = "point"} : tensor<2x16x6x6xf32>
    func.return %y, %z : tensor<2x16x6x6xf32>, tensor<2x16x6x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%x: tensor<2x8x6x6xf32>) -> (tensor<2x16x6x6xf32>, tensor<2x16x6x6xf32>) {
// CHECK-NEXT:     %w = qc.const @taps.weight : tensor<16x8x3x3xbf16>
// CHECK-NEXT:     %p = qc.const @point.weight : tensor<16x8x1x1xbf16>
// CHECK-NEXT:     %0 = tensor.empty() : tensor<16x3x3x8xbf16>
// CHECK-NEXT:     %1 = linalg.transpose ins(%w:tensor<16x8x3x3xbf16>) outs(%0:tensor<16x3x3x8xbf16>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %2 = tensor.collapse_shape %1 [[0 : i64], [1 : i64, 2 : i64, 3 : i64]] {qc.path = "taps"} : tensor<16x3x3x8xbf16> into tensor<16x72xbf16>
// CHECK-NEXT:     %3 = tensor.empty() : tensor<2x6x6x8xbf16>
// CHECK-NEXT:     %4 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d3, d1, d2)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%x : tensor<2x8x6x6xf32>) outs(%3 : tensor<2x6x6x8xbf16>) attrs =  {qc.path = "taps"} {
// CHECK-NEXT:     ^bb0(%5: f32, %6: bf16):
// CHECK-NEXT:       %7 = arith.truncf %5 : f32 to bf16
// CHECK-NEXT:       linalg.yield %7 : bf16
// CHECK-NEXT:     } -> tensor<2x6x6x8xbf16>
// CHECK-NEXT:     %8 = qc.windows %4 {kernel = array<i64: 3, 3>, strides = array<i64: 1, 1>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, qc.path = "taps"} : tensor<2x6x6x72xbf16>
// CHECK-NEXT:     %9 = qc.linear %8, %2 {qc.path = "taps"} : tensor<2x6x6x16xf32>
// CHECK-NEXT:     %10 = tensor.empty() : tensor<2x16x6x6xf32>
// CHECK-NEXT:     %y = linalg.transpose ins(%9:tensor<2x6x6x16xf32>) outs(%10:tensor<2x16x6x6xf32>) permutation = [0, 3, 1, 2]
// CHECK-NEXT:     %11 = tensor.empty() : tensor<2x6x6x8xf32>
// CHECK-NEXT:     %12 = linalg.transpose ins(%x:tensor<2x8x6x6xf32>) outs(%11:tensor<2x6x6x8xf32>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %13 = tensor.collapse_shape %p [[0 : i64], [1 : i64, 2 : i64, 3 : i64]] {qc.path = "point"} : tensor<16x8x1x1xbf16> into tensor<16x8xbf16>
// CHECK-NEXT:     %14 = qc.linear %12, %13 {qc.path = "point"} : tensor<2x6x6x16xf32>
// CHECK-NEXT:     %15 = tensor.empty() : tensor<2x16x6x6xf32>
// CHECK-NEXT:     %z = linalg.transpose ins(%14:tensor<2x6x6x16xf32>) outs(%15:tensor<2x16x6x6xf32>) permutation = [0, 3, 1, 2]
// CHECK-NEXT:     func.return %y, %z : tensor<2x16x6x6xf32>, tensor<2x16x6x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

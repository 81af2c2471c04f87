// RUN: qc opt -p lower-conv2d -p dce %s | filecheck %s
builtin.module {
  func.func @main(%x: tensor<2x8x6x6xf32>) -> tensor<2x24x6xf32> {
    %w = qc.const @weight : tensor<4x8x1x1xf32>
    %y = qc.conv2d %x, %w {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>, groups = 1, qc.path = "conv"} : tensor<2x4x6x6xf32>
    %c = tensor.collapse_shape %y [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] : tensor<2x4x6x6xf32> into tensor<2x24x6xf32>
    %into = tensor.empty() : tensor<2x24x6xf32>
    %r = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>], iterator_types = ["parallel", "parallel", "parallel"]} ins(%c : tensor<2x24x6xf32>) outs(%into : tensor<2x24x6xf32>) {
    ^bb0(%a: f32, %o: f32):
      %m = math.absf %a : f32
      linalg.yield %m : f32
    } -> tensor<2x24x6xf32>
    func.return %r : tensor<2x24x6xf32>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%x: tensor<2x8x6x6xf32>) -> tensor<2x24x6xf32> {
// CHECK-NEXT:     %w = qc.const @weight : tensor<4x8x1x1xf32>
// CHECK-NEXT:     %0 = tensor.empty() : tensor<2x6x6x8xf32>
// CHECK-NEXT:     %1 = linalg.transpose ins(%x:tensor<2x8x6x6xf32>) outs(%0:tensor<2x6x6x8xf32>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %2 = tensor.empty() : tensor<4x1x1x8xf32>
// CHECK-NEXT:     %3 = linalg.transpose ins(%w:tensor<4x8x1x1xf32>) outs(%2:tensor<4x1x1x8xf32>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %4 = tensor.collapse_shape %3 [[0 : i64, 1 : i64, 2 : i64], [3 : i64]] {qc.path = "conv"} : tensor<4x1x1x8xf32> into tensor<4x8xf32>
// CHECK-NEXT:     %5 = qc.linear %1, %4 {qc.path = "conv"} : tensor<2x6x6x4xf32>
// CHECK-NEXT:     %6 = tensor.empty() : tensor<2x4x6x6xf32>
// CHECK-NEXT:     %y = linalg.transpose ins(%5:tensor<2x6x6x4xf32>) outs(%6:tensor<2x4x6x6xf32>) permutation = [0, 3, 1, 2]
// CHECK-NEXT:     %c = tensor.collapse_shape %y [[0 : i64], [1 : i64, 2 : i64], [3 : i64]] : tensor<2x4x6x6xf32> into tensor<2x24x6xf32>
// CHECK-NEXT:     %into = tensor.empty() : tensor<2x24x6xf32>
// CHECK-NEXT:     %r = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1, d2)>], iterator_types = ["parallel", "parallel", "parallel"]} ins(%c : tensor<2x24x6xf32>) outs(%into : tensor<2x24x6xf32>) {
// CHECK-NEXT:     ^bb0(%a: f32, %o: f32):
// CHECK-NEXT:       %m = math.absf %a : f32
// CHECK-NEXT:       linalg.yield %m : f32
// CHECK-NEXT:     } -> tensor<2x24x6xf32>
// CHECK-NEXT:     func.return %r : tensor<2x24x6xf32>
// CHECK-NEXT:   }
// CHECK-NEXT: }

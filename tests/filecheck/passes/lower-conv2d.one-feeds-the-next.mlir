// RUN: qc opt -p lower-conv2d -p dce %s | filecheck %s
builtin.module {
  func.func @main(%x: tensor<?x8x32x32xf32, #qc.dims<["b", 8, 32, 32]>>) -> tensor<?x4x16x16xf32, #qc.dims<["b", 4, 16, 16]>> attributes {qc.ranges = {b = array<i64: 1, 8>}} {
    %q = qc.const @first.weight : !qc.qtensor<16x72xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
    %d = qc.dequantize %q : tensor<16x72xf32>
    %k = tensor.expand_shape %d [[0 : i64], [1 : i64, 2 : i64, 3 : i64]] output_shape [16, 3, 3, 8] : tensor<16x72xf32> into tensor<16x3x3x8xf32>
    %e = tensor.empty() : tensor<16x8x3x3xf32>
    %w = linalg.transpose ins(%k:tensor<16x3x3x8xf32>) outs(%e:tensor<16x8x3x3xf32>) permutation = [0, 3, 1, 2]
    %bias = qc.const @first.bias : tensor<16xf32>
    %y = qc.conv2d %x, %w bias(%bias) {strides = array<i64: 2, 2>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, groups = 1, qc.path = "first"} : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>
    %n = qc.dim "b" : index
    %into = tensor.empty(%n) : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>
    %r = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%y : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>) outs(%into : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>) {
    ^bb0(%a: f32, %o: f32):
      %zero = arith.constant 0.000000e+00 : f32
      %m = arith.maximumf %a, %zero : f32
      linalg.yield %m : f32
    } -> tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>
    %v = qc.const @second.weight : tensor<4x16x1x1xf32>
    %z = qc.conv2d %r, %v {strides = array<i64: 1, 1>, padding = array<i64: 0, 0, 0, 0>, dilation = array<i64: 1, 1>, groups = 1, qc.path = "second"} : tensor<?x4x16x16xf32, #qc.dims<["b", 4, 16, 16]>>
    func.return %z : tensor<?x4x16x16xf32, #qc.dims<["b", 4, 16, 16]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%x: tensor<?x8x32x32xf32, #qc.dims<["b", 8, 32, 32]>>) -> tensor<?x4x16x16xf32, #qc.dims<["b", 4, 16, 16]>> attributes {qc.ranges = {b = array<i64: 1, 8>}} {
// CHECK-NEXT:     %q = qc.const @first.weight : !qc.qtensor<16x72xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %d = qc.dequantize %q : tensor<16x72xf32>
// CHECK-NEXT:     %k = tensor.expand_shape %d [[0 : i64], [1 : i64, 2 : i64, 3 : i64]] output_shape [16, 3, 3, 8] : tensor<16x72xf32> into tensor<16x3x3x8xf32>
// CHECK-NEXT:     %bias = qc.const @first.bias : tensor<16xf32>
// CHECK-NEXT:     %0 = qc.dim "b" : index
// CHECK-NEXT:     %1 = tensor.empty(%0) : tensor<?x32x32x8xf32, #qc.dims<["b", 32, 32, 8]>>
// CHECK-NEXT:     %2 = linalg.transpose ins(%x:tensor<?x8x32x32xf32, #qc.dims<["b", 8, 32, 32]>>) outs(%1:tensor<?x32x32x8xf32, #qc.dims<["b", 32, 32, 8]>>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %3 = tensor.collapse_shape %k [[0 : i64], [1 : i64, 2 : i64, 3 : i64]] {qc.path = "first"} : tensor<16x3x3x8xf32> into tensor<16x72xf32>
// CHECK-NEXT:     %4 = qc.windows %2 {kernel = array<i64: 3, 3>, strides = array<i64: 2, 2>, padding = array<i64: 1, 1, 1, 1>, dilation = array<i64: 1, 1>, qc.path = "first"} : tensor<?x16x16x72xf32, #qc.dims<["b", 16, 16, 72]>>
// CHECK-NEXT:     %5 = qc.linear %4, %3 bias(%bias) {qc.path = "first"} : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>
// CHECK-NEXT:     %6 = qc.dim "b" : index
// CHECK-NEXT:     %7 = tensor.empty(%6) : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>
// CHECK-NEXT:     %y = linalg.transpose ins(%5:tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>) outs(%7:tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>) permutation = [0, 3, 1, 2]
// CHECK-NEXT:     %8 = qc.dim "b" : index
// CHECK-NEXT:     %9 = tensor.empty(%8) : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>
// CHECK-NEXT:     %10 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d2, d3, d1)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%y : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>) outs(%9 : tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>) {
// CHECK-NEXT:     ^bb0(%a: f32, %o: f32):
// CHECK-NEXT:       %zero = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:       %m = arith.maximumf %a, %zero : f32
// CHECK-NEXT:       linalg.yield %m : f32
// CHECK-NEXT:     } -> tensor<?x16x16x16xf32, #qc.dims<["b", 16, 16, 16]>>
// CHECK-NEXT:     %v = qc.const @second.weight : tensor<4x16x1x1xf32>
// CHECK-NEXT:     %11 = tensor.empty() : tensor<4x1x1x16xf32>
// CHECK-NEXT:     %12 = linalg.transpose ins(%v:tensor<4x16x1x1xf32>) outs(%11:tensor<4x1x1x16xf32>) permutation = [0, 2, 3, 1]
// CHECK-NEXT:     %13 = tensor.collapse_shape %12 [[0 : i64, 1 : i64, 2 : i64], [3 : i64]] {qc.path = "second"} : tensor<4x1x1x16xf32> into tensor<4x16xf32>
// CHECK-NEXT:     %14 = qc.linear %10, %13 {qc.path = "second"} : tensor<?x16x16x4xf32, #qc.dims<["b", 16, 16, 4]>>
// CHECK-NEXT:     %15 = qc.dim "b" : index
// CHECK-NEXT:     %16 = tensor.empty(%15) : tensor<?x4x16x16xf32, #qc.dims<["b", 4, 16, 16]>>
// CHECK-NEXT:     %z = linalg.transpose ins(%14:tensor<?x16x16x4xf32, #qc.dims<["b", 16, 16, 4]>>) outs(%16:tensor<?x4x16x16xf32, #qc.dims<["b", 4, 16, 16]>>) permutation = [0, 3, 1, 2]
// CHECK-NEXT:     func.return %z : tensor<?x4x16x16xf32, #qc.dims<["b", 4, 16, 16]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

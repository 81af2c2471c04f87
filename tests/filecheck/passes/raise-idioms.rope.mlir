// RUN: qc opt -p raise-idioms %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %1: tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>>, %2: tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>>) -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %3 = qc.dim "s" : index
    %4 = tensor.extract_slice %0[0, 0, 0, 0] [1, 2, %3, 2] [1, 1, 1, 1] : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> to tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>
    %5 = qc.dim "s" : index
    %6 = tensor.extract_slice %0[0, 0, 0, 2] [1, 2, %5, 2] [1, 1, 1, 1] : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> to tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>
    %7 = qc.dim "s" : index
    %8 = tensor.empty(%7) : tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>
    %9 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%6 : tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>) outs(%8 : tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>) {
    ^bb0(%10: f32, %11: f32):
      %12 = arith.negf %10 : f32
      linalg.yield %12 : f32
    } -> tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>
    %13 = tensor.concat dim(3) %9, %4 : (tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>, tensor<1x2x?x2xf32, #qc.dims<[1, 2, "s", 2]>>) -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    %14 = qc.dim "s" : index
    %15 = tensor.expand_shape %1 [[0 : i64, 1 : i64], [2 : i64], [3 : i64]] output_shape [1, 1, %14, 4] : tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>> into tensor<1x1x?x4xf32, #qc.dims<[1, 1, "s", 4]>>
    %16 = qc.dim "s" : index
    %17 = tensor.expand_shape %2 [[0 : i64, 1 : i64], [2 : i64], [3 : i64]] output_shape [1, 1, %16, 4] : tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>> into tensor<1x1x?x4xf32, #qc.dims<[1, 1, "s", 4]>>
    %18 = qc.dim "s" : index
    %19 = tensor.empty(%18) : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    %20 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, 0, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%0, %15 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, tensor<1x1x?x4xf32, #qc.dims<[1, 1, "s", 4]>>) outs(%19 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>) {
    ^bb0(%21: f32, %22: f32, %23: f32):
      %24 = arith.mulf %21, %22 : f32
      linalg.yield %24 : f32
    } -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    %25 = qc.dim "s" : index
    %26 = tensor.empty(%25) : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    %27 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, 0, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%13, %17 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, tensor<1x1x?x4xf32, #qc.dims<[1, 1, "s", 4]>>) outs(%26 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>) {
    ^bb0(%28: f32, %29: f32, %30: f32):
      %31 = arith.mulf %28, %29 : f32
      linalg.yield %31 : f32
    } -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    %32 = qc.dim "s" : index
    %33 = tensor.empty(%32) : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    %34 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%20, %27 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>) outs(%33 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>) {
    ^bb0(%35: f32, %36: f32, %37: f32):
      %38 = arith.addf %35, %36 : f32
      linalg.yield %38 : f32
    } -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    func.return %34 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %1: tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>>, %2: tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>>) -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %3 = qc.dim "s" : index
// CHECK-NEXT:     %4 = tensor.expand_shape %1 [[0 : i64, 1 : i64], [2 : i64], [3 : i64]] output_shape [1, 1, %3, 4] : tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>> into tensor<1x1x?x4xf32, #qc.dims<[1, 1, "s", 4]>>
// CHECK-NEXT:     %5 = qc.dim "s" : index
// CHECK-NEXT:     %6 = tensor.expand_shape %2 [[0 : i64, 1 : i64], [2 : i64], [3 : i64]] output_shape [1, 1, %5, 4] : tensor<1x?x4xf32, #qc.dims<[1, "s", 4]>> into tensor<1x1x?x4xf32, #qc.dims<[1, 1, "s", 4]>>
// CHECK-NEXT:     %7 = qc.rope %0, %4, %6 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
// CHECK-NEXT:     func.return %7 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

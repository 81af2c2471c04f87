// RUN: qc opt -p raise-idioms %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?x8xf32, #qc.dims<["s", 8]>>, %2: tensor<8xf32>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %3 = qc.dim "s" : index
    %4 = tensor.empty(%3) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %5 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %0 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%4 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%6: f32, %7: f32, %8: f32):
      %9 = arith.mulf %6, %7 : f32
      linalg.yield %9 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %10 = arith.constant 0.000000e+00 : f32
    %11 = qc.dim "s" : index
    %12 = tensor.empty(%11) : tensor<?xf32, #qc.dims<["s"]>>
    %13 = linalg.fill ins(%10 : f32) outs(%12 : tensor<?xf32, #qc.dims<["s"]>>) -> tensor<?xf32, #qc.dims<["s"]>>
    %14 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%5 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%13 : tensor<?xf32, #qc.dims<["s"]>>) {
    ^bb0(%15: f32, %16: f32):
      %17 = arith.addf %15, %16 : f32
      linalg.yield %17 : f32
    } -> tensor<?xf32, #qc.dims<["s"]>>
    %18 = qc.dim "s" : index
    %19 = tensor.expand_shape %14 [[0 : i64, 1 : i64]] output_shape [%18, 1] : tensor<?xf32, #qc.dims<["s"]>> into tensor<?x1xf32, #qc.dims<["s", 1]>>
    %20 = qc.dim "s" : index
    %21 = tensor.empty(%20) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %22 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%19 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%21 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%23: f32, %24: f32):
      %25 = arith.constant 8.000000e+00 : f32
      %26 = arith.divf %23, %25 : f32
      linalg.yield %26 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %27 = qc.dim "s" : index
    %28 = tensor.empty(%27) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %29 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%22 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%28 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%30: f32, %31: f32):
      %32 = arith.constant 1.000000e-05 : f32
      %33 = arith.addf %30, %32 : f32
      linalg.yield %33 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %34 = qc.dim "s" : index
    %35 = tensor.empty(%34) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %36 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%29 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%35 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%37: f32, %38: f32):
      %39 = math.rsqrt %37 : f32
      linalg.yield %39 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %40 = qc.dim "s" : index
    %41 = tensor.empty(%40) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %42 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, 0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%1, %36 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%41 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%43: f32, %44: f32, %45: f32):
      %46 = arith.mulf %43, %44 : f32
      linalg.yield %46 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %47 = qc.dim "s" : index
    %48 = tensor.empty(%47) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %49 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2, %42 : tensor<8xf32>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%48 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%50: f32, %51: f32, %52: f32):
      %53 = arith.mulf %50, %51 : f32
      linalg.yield %53 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %49 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?x8xf32, #qc.dims<["s", 8]>>, %2: tensor<8xf32>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %3 = qc.dim "s" : index
// CHECK-NEXT:     %4 = tensor.empty(%3) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %5 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %0 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%4 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%6: f32, %7: f32, %8: f32):
// CHECK-NEXT:       %9 = arith.mulf %6, %7 : f32
// CHECK-NEXT:       linalg.yield %9 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %10 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:     %11 = qc.dim "s" : index
// CHECK-NEXT:     %12 = tensor.empty(%11) : tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %13 = linalg.fill ins(%10 : f32) outs(%12 : tensor<?xf32, #qc.dims<["s"]>>) -> tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %14 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%5 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%13 : tensor<?xf32, #qc.dims<["s"]>>) {
// CHECK-NEXT:     ^bb0(%15: f32, %16: f32):
// CHECK-NEXT:       %17 = arith.addf %15, %16 : f32
// CHECK-NEXT:       linalg.yield %17 : f32
// CHECK-NEXT:     } -> tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %18 = qc.dim "s" : index
// CHECK-NEXT:     %19 = tensor.expand_shape %14 [[0 : i64, 1 : i64]] output_shape [%18, 1] : tensor<?xf32, #qc.dims<["s"]>> into tensor<?x1xf32, #qc.dims<["s", 1]>>
// CHECK-NEXT:     %20 = qc.dim "s" : index
// CHECK-NEXT:     %21 = tensor.empty(%20) : tensor<?x1xf32, #qc.dims<["s", 1]>>
// CHECK-NEXT:     %22 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%19 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%21 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
// CHECK-NEXT:     ^bb0(%23: f32, %24: f32):
// CHECK-NEXT:       %25 = arith.constant 8.000000e+00 : f32
// CHECK-NEXT:       %26 = arith.divf %23, %25 : f32
// CHECK-NEXT:       linalg.yield %26 : f32
// CHECK-NEXT:     } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
// CHECK-NEXT:     %27 = qc.dim "s" : index
// CHECK-NEXT:     %28 = tensor.empty(%27) : tensor<?x1xf32, #qc.dims<["s", 1]>>
// CHECK-NEXT:     %29 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%22 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%28 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
// CHECK-NEXT:     ^bb0(%30: f32, %31: f32):
// CHECK-NEXT:       %32 = arith.constant 1.000000e-05 : f32
// CHECK-NEXT:       %33 = arith.addf %30, %32 : f32
// CHECK-NEXT:       linalg.yield %33 : f32
// CHECK-NEXT:     } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
// CHECK-NEXT:     %34 = qc.dim "s" : index
// CHECK-NEXT:     %35 = tensor.empty(%34) : tensor<?x1xf32, #qc.dims<["s", 1]>>
// CHECK-NEXT:     %36 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%29 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%35 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
// CHECK-NEXT:     ^bb0(%37: f32, %38: f32):
// CHECK-NEXT:       %39 = math.rsqrt %37 : f32
// CHECK-NEXT:       linalg.yield %39 : f32
// CHECK-NEXT:     } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
// CHECK-NEXT:     %40 = qc.dim "s" : index
// CHECK-NEXT:     %41 = tensor.empty(%40) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %42 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, 0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%1, %36 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%41 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%43: f32, %44: f32, %45: f32):
// CHECK-NEXT:       %46 = arith.mulf %43, %44 : f32
// CHECK-NEXT:       linalg.yield %46 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %47 = qc.dim "s" : index
// CHECK-NEXT:     %48 = tensor.empty(%47) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %49 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2, %42 : tensor<8xf32>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%48 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%50: f32, %51: f32, %52: f32):
// CHECK-NEXT:       %53 = arith.mulf %50, %51 : f32
// CHECK-NEXT:       linalg.yield %53 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %49 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p raise-idioms %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %2 = qc.dim "s" : index
    %3 = tensor.empty(%2) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %4 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %0 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%3 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%5: f32, %6: f32, %7: f32):
      %8 = arith.mulf %5, %6 : f32
      linalg.yield %8 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %9 = arith.constant 0.000000e+00 : f32
    %10 = qc.dim "s" : index
    %11 = tensor.empty(%10) : tensor<?xf32, #qc.dims<["s"]>>
    %12 = linalg.fill ins(%9 : f32) outs(%11 : tensor<?xf32, #qc.dims<["s"]>>) -> tensor<?xf32, #qc.dims<["s"]>>
    %13 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%4 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%12 : tensor<?xf32, #qc.dims<["s"]>>) {
    ^bb0(%14: f32, %15: f32):
      %16 = arith.addf %14, %15 : f32
      linalg.yield %16 : f32
    } -> tensor<?xf32, #qc.dims<["s"]>>
    %17 = qc.dim "s" : index
    %18 = tensor.expand_shape %13 [[0 : i64, 1 : i64]] output_shape [%17, 1] : tensor<?xf32, #qc.dims<["s"]>> into tensor<?x1xf32, #qc.dims<["s", 1]>>
    %19 = qc.dim "s" : index
    %20 = tensor.empty(%19) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %21 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%18 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%20 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%22: f32, %23: f32):
      %24 = arith.constant 8.000000e+00 : f32
      %25 = arith.divf %22, %24 : f32
      linalg.yield %25 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %26 = qc.dim "s" : index
    %27 = tensor.empty(%26) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %28 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%21 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%27 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%29: f32, %30: f32):
      %31 = arith.constant 1.000000e-05 : f32
      %32 = arith.addf %29, %31 : f32
      linalg.yield %32 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %33 = qc.dim "s" : index
    %34 = tensor.empty(%33) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %35 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%28 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%34 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%36: f32, %37: f32):
      %38 = math.rsqrt %36 : f32
      linalg.yield %38 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %39 = qc.dim "s" : index
    %40 = tensor.empty(%39) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %41 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, 0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %35 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%40 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%42: f32, %43: f32, %44: f32):
      %45 = arith.mulf %42, %43 : f32
      linalg.yield %45 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %46 = qc.dim "s" : index
    %47 = tensor.empty(%46) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %48 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%1, %41 : tensor<8xf32>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%47 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%49: f32, %50: f32, %51: f32):
      %52 = arith.mulf %49, %50 : f32
      linalg.yield %52 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %48 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %2 = qc.rms_norm %0 weight(%1) {eps = 9.9999997473787516e-06} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

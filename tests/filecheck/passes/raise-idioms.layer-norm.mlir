// RUN: qc opt -p raise-idioms %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>, %2: tensor<8xf32>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %3 = arith.constant 0.000000e+00 : f32
    %4 = qc.dim "s" : index
    %5 = tensor.empty(%4) : tensor<?xf32, #qc.dims<["s"]>>
    %6 = linalg.fill ins(%3 : f32) outs(%5 : tensor<?xf32, #qc.dims<["s"]>>) -> tensor<?xf32, #qc.dims<["s"]>>
    %7 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%6 : tensor<?xf32, #qc.dims<["s"]>>) {
    ^bb0(%8: f32, %9: f32):
      %10 = arith.addf %8, %9 : f32
      linalg.yield %10 : f32
    } -> tensor<?xf32, #qc.dims<["s"]>>
    %11 = qc.dim "s" : index
    %12 = tensor.expand_shape %7 [[0 : i64, 1 : i64]] output_shape [%11, 1] : tensor<?xf32, #qc.dims<["s"]>> into tensor<?x1xf32, #qc.dims<["s", 1]>>
    %13 = qc.dim "s" : index
    %14 = tensor.empty(%13) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %15 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%12 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%14 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%16: f32, %17: f32):
      %18 = arith.constant 8.000000e+00 : f32
      %19 = arith.divf %16, %18 : f32
      linalg.yield %19 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %20 = qc.dim "s" : index
    %21 = tensor.empty(%20) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %22 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, 0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %15 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%21 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%23: f32, %24: f32, %25: f32):
      %26 = arith.subf %23, %24 : f32
      linalg.yield %26 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %27 = qc.dim "s" : index
    %28 = tensor.empty(%27) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %29 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%22, %22 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%28 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%30: f32, %31: f32, %32: f32):
      %33 = arith.mulf %30, %31 : f32
      linalg.yield %33 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %34 = arith.constant 0.000000e+00 : f32
    %35 = qc.dim "s" : index
    %36 = tensor.empty(%35) : tensor<?xf32, #qc.dims<["s"]>>
    %37 = linalg.fill ins(%34 : f32) outs(%36 : tensor<?xf32, #qc.dims<["s"]>>) -> tensor<?xf32, #qc.dims<["s"]>>
    %38 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%29 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%37 : tensor<?xf32, #qc.dims<["s"]>>) {
    ^bb0(%39: f32, %40: f32):
      %41 = arith.addf %39, %40 : f32
      linalg.yield %41 : f32
    } -> tensor<?xf32, #qc.dims<["s"]>>
    %42 = qc.dim "s" : index
    %43 = tensor.expand_shape %38 [[0 : i64, 1 : i64]] output_shape [%42, 1] : tensor<?xf32, #qc.dims<["s"]>> into tensor<?x1xf32, #qc.dims<["s", 1]>>
    %44 = qc.dim "s" : index
    %45 = tensor.empty(%44) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %46 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%43 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%45 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%47: f32, %48: f32):
      %49 = arith.constant 8.000000e+00 : f32
      %50 = arith.divf %47, %49 : f32
      linalg.yield %50 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %51 = qc.dim "s" : index
    %52 = tensor.empty(%51) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %53 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%46 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%52 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%54: f32, %55: f32):
      %56 = arith.constant 1.000000e-05 : f32
      %57 = arith.addf %54, %56 : f32
      linalg.yield %57 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %58 = qc.dim "s" : index
    %59 = tensor.empty(%58) : tensor<?x1xf32, #qc.dims<["s", 1]>>
    %60 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%53 : tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%59 : tensor<?x1xf32, #qc.dims<["s", 1]>>) {
    ^bb0(%61: f32, %62: f32):
      %63 = math.sqrt %61 : f32
      linalg.yield %63 : f32
    } -> tensor<?x1xf32, #qc.dims<["s", 1]>>
    %64 = qc.dim "s" : index
    %65 = tensor.empty(%64) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %66 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, 0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%22, %60 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%65 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%67: f32, %68: f32, %69: f32):
      %70 = arith.divf %67, %68 : f32
      linalg.yield %70 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %71 = qc.dim "s" : index
    %72 = tensor.empty(%71) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %73 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%66, %1 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>) outs(%72 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%74: f32, %75: f32, %76: f32):
      %77 = arith.mulf %74, %75 : f32
      linalg.yield %77 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %78 = qc.dim "s" : index
    %79 = tensor.empty(%78) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %80 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%73, %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>) outs(%79 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%81: f32, %82: f32, %83: f32):
      %84 = arith.addf %81, %82 : f32
      linalg.yield %84 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %80 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>, %2: tensor<8xf32>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %3 = qc.layer_norm %0 weight(%1) bias(%2) {eps = 9.9999997473787516e-06} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %3 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

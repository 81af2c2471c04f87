// RUN: qc opt -p hoist-constant-masks %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = tensor.empty(%1) : tensor<?xf32, #qc.dims<["s"]>>
    %3 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%2 : tensor<?xf32, #qc.dims<["s"]>>) {
    ^bb0(%4: f32):
      %5 = linalg.index 0 : index
      %6 = arith.index_cast %5 : index to i64
      %7 = arith.sitofp %6 : i64 to f32
      %8 = math.sin %7 : f32
      linalg.yield %8 : f32
    } -> tensor<?xf32, #qc.dims<["s"]>>
    %9 = arith.constant 0.000000e+00 : f32
    %10 = tensor.empty() : tensor<f32>
    %11 = linalg.fill ins(%9 : f32) outs(%10 : tensor<f32>) -> tensor<f32>
    %12 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> ()>], iterator_types = ["reduction"]} ins(%3 : tensor<?xf32, #qc.dims<["s"]>>) outs(%11 : tensor<f32>) {
    ^bb0(%13: f32, %14: f32):
      %15 = arith.addf %13, %14 : f32
      linalg.yield %15 : f32
    } -> tensor<f32>
    %16 = qc.dim "s" : index
    %17 = tensor.empty(%16) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %18 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> ()>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %12 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<f32>) outs(%17 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%19: f32, %20: f32, %21: f32):
      %22 = arith.mulf %19, %20 : f32
      linalg.yield %22 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %18 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.dim "s" : index
// CHECK-NEXT:     %2 = tensor.empty(%1) : tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %3 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%2 : tensor<?xf32, #qc.dims<["s"]>>) {
// CHECK-NEXT:     ^bb0(%4: f32):
// CHECK-NEXT:       %5 = linalg.index 0 : index
// CHECK-NEXT:       %6 = arith.index_cast %5 : index to i64
// CHECK-NEXT:       %7 = arith.sitofp %6 : i64 to f32
// CHECK-NEXT:       %8 = math.sin %7 : f32
// CHECK-NEXT:       linalg.yield %8 : f32
// CHECK-NEXT:     } -> tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %9 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:     %10 = tensor.empty() : tensor<f32>
// CHECK-NEXT:     %11 = linalg.fill ins(%9 : f32) outs(%10 : tensor<f32>) -> tensor<f32>
// CHECK-NEXT:     %12 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> ()>], iterator_types = ["reduction"]} ins(%3 : tensor<?xf32, #qc.dims<["s"]>>) outs(%11 : tensor<f32>) {
// CHECK-NEXT:     ^bb0(%13: f32, %14: f32):
// CHECK-NEXT:       %15 = arith.addf %13, %14 : f32
// CHECK-NEXT:       linalg.yield %15 : f32
// CHECK-NEXT:     } -> tensor<f32>
// CHECK-NEXT:     %16 = qc.dim "s" : index
// CHECK-NEXT:     %17 = tensor.empty(%16) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %18 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> ()>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %12 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<f32>) outs(%17 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%19: f32, %20: f32, %21: f32):
// CHECK-NEXT:       %22 = arith.mulf %19, %20 : f32
// CHECK-NEXT:       linalg.yield %22 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %18 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

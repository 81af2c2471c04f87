// RUN: qc opt -p fuse-elementwise %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?xf32, #qc.dims<["s"]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %2 = qc.dim "s" : index
    %3 = tensor.empty(%2) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %4 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%3 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%5: f32, %6: f32):
      %7 = math.exp %5 : f32
      linalg.yield %7 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %8 = qc.dim "s" : index
    %9 = tensor.empty(%8) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %10 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%4, %1 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%9 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%11: f32, %12: f32, %13: f32):
      %14 = arith.addf %11, %12 : f32
      linalg.yield %14 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %15 = qc.dim "s" : index
    %16 = tensor.empty(%15) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %17 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%10 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%16 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%18: f32, %19: f32):
      %20 = math.tanh %18 : f32
      linalg.yield %20 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %21 = arith.constant 0.000000e+00 : f32
    %22 = qc.dim "s" : index
    %23 = tensor.empty(%22) : tensor<?xf32, #qc.dims<["s"]>>
    %24 = linalg.fill ins(%21 : f32) outs(%23 : tensor<?xf32, #qc.dims<["s"]>>) -> tensor<?xf32, #qc.dims<["s"]>>
    %25 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%17 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%24 : tensor<?xf32, #qc.dims<["s"]>>) {
    ^bb0(%26: f32, %27: f32):
      %28 = arith.addf %26, %27 : f32
      linalg.yield %28 : f32
    } -> tensor<?xf32, #qc.dims<["s"]>>
    func.return %25 : tensor<?xf32, #qc.dims<["s"]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?xf32, #qc.dims<["s"]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %2 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:     %3 = qc.dim "s" : index
// CHECK-NEXT:     %4 = tensor.empty(%3) : tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %5 = linalg.fill ins(%2 : f32) outs(%4 : tensor<?xf32, #qc.dims<["s"]>>) -> tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %6 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%0, %1 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%5 : tensor<?xf32, #qc.dims<["s"]>>) {
// CHECK-NEXT:     ^bb0(%7: f32, %8: f32, %9: f32):
// CHECK-NEXT:       %10 = math.exp %7 : f32
// CHECK-NEXT:       %11 = arith.addf %10, %8 : f32
// CHECK-NEXT:       %12 = math.tanh %11 : f32
// CHECK-NEXT:       %13 = arith.addf %12, %9 : f32
// CHECK-NEXT:       linalg.yield %13 : f32
// CHECK-NEXT:     } -> tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     func.return %6 : tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

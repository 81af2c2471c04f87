// RUN: qc opt -p fuse-epilogues %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @g : tensor<6x8xf32>
    %2 = qc.linear %0, %1 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    %3 = qc.const @u : tensor<6x8xf32>
    %4 = qc.linear %0, %3 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    %5 = qc.dim "s" : index
    %6 = tensor.empty(%5) : tensor<?x6xf32, #qc.dims<["s", 6]>>
    %7 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2 : tensor<?x6xf32, #qc.dims<["s", 6]>>) outs(%6 : tensor<?x6xf32, #qc.dims<["s", 6]>>) {
    ^bb0(%8: f32, %9: f32):
      %10 = arith.constant 1.000000e+00 : f32
      %11 = arith.constant 1.000000e+00 : f32
      %12 = arith.negf %8 : f32
      %13 = math.exp %12 : f32
      %14 = arith.addf %11, %13 : f32
      %15 = arith.divf %10, %14 : f32
      linalg.yield %15 : f32
    } -> tensor<?x6xf32, #qc.dims<["s", 6]>>
    %16 = qc.dim "s" : index
    %17 = tensor.empty(%16) : tensor<?x6xf32, #qc.dims<["s", 6]>>
    %18 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2, %7 : tensor<?x6xf32, #qc.dims<["s", 6]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>) outs(%17 : tensor<?x6xf32, #qc.dims<["s", 6]>>) {
    ^bb0(%19: f32, %20: f32, %21: f32):
      %22 = arith.mulf %19, %20 : f32
      linalg.yield %22 : f32
    } -> tensor<?x6xf32, #qc.dims<["s", 6]>>
    %23 = qc.dim "s" : index
    %24 = tensor.empty(%23) : tensor<?x6xf32, #qc.dims<["s", 6]>>
    %25 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%18, %4 : tensor<?x6xf32, #qc.dims<["s", 6]>>, tensor<?x6xf32, #qc.dims<["s", 6]>>) outs(%24 : tensor<?x6xf32, #qc.dims<["s", 6]>>) {
    ^bb0(%26: f32, %27: f32, %28: f32):
      %29 = arith.mulf %26, %27 : f32
      linalg.yield %29 : f32
    } -> tensor<?x6xf32, #qc.dims<["s", 6]>>
    func.return %25 : tensor<?x6xf32, #qc.dims<["s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @g : tensor<6x8xf32>
// CHECK-NEXT:     %2 = qc.linear %0, %1 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:     %3 = qc.const @u : tensor<6x8xf32>
// CHECK-NEXT:     %4 = qc.linear %0, %3 extras(%2) : tensor<?x6xf32, #qc.dims<["s", 6]>> {
// CHECK-NEXT:     ^bb0(%5: f32, %6: f32):
// CHECK-NEXT:       %7 = arith.constant 1.000000e+00 : f32
// CHECK-NEXT:       %8 = arith.negf %6 : f32
// CHECK-NEXT:       %9 = math.exp %8 : f32
// CHECK-NEXT:       %10 = arith.addf %7, %9 : f32
// CHECK-NEXT:       %11 = arith.divf %7, %10 : f32
// CHECK-NEXT:       %12 = arith.mulf %6, %11 : f32
// CHECK-NEXT:       %13 = arith.mulf %12, %5 : f32
// CHECK-NEXT:       qc.yield %13
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %4 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

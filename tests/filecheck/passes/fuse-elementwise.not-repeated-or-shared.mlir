// RUN: qc opt -p fuse-elementwise %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>) -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %2 = tensor.empty() : tensor<8xf32>
    %3 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} ins(%1 : tensor<8xf32>) outs(%2 : tensor<8xf32>) {
    ^bb0(%4: f32, %5: f32):
      %6 = math.exp %4 : f32
      linalg.yield %6 : f32
    } -> tensor<8xf32>
    %7 = qc.dim "s" : index
    %8 = tensor.empty(%7) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %9 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%8 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%10: f32, %11: f32):
      %12 = math.tanh %10 : f32
      linalg.yield %12 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %13 = qc.dim "s" : index
    %14 = tensor.empty(%13) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %15 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%9, %3 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>) outs(%14 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%16: f32, %17: f32, %18: f32):
      %19 = arith.addf %16, %17 : f32
      linalg.yield %19 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %15, %9 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>) -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %2 = tensor.empty() : tensor<8xf32>
// CHECK-NEXT:     %3 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} ins(%1 : tensor<8xf32>) outs(%2 : tensor<8xf32>) {
// CHECK-NEXT:     ^bb0(%4: f32, %5: f32):
// CHECK-NEXT:       %6 = math.exp %4 : f32
// CHECK-NEXT:       linalg.yield %6 : f32
// CHECK-NEXT:     } -> tensor<8xf32>
// CHECK-NEXT:     %7 = qc.dim "s" : index
// CHECK-NEXT:     %8 = tensor.empty(%7) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %9 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%8 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%10: f32, %11: f32):
// CHECK-NEXT:       %12 = math.tanh %10 : f32
// CHECK-NEXT:       linalg.yield %12 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %13 = qc.dim "s" : index
// CHECK-NEXT:     %14 = tensor.empty(%13) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %15 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%9, %3 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>) outs(%14 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%16: f32, %17: f32, %18: f32):
// CHECK-NEXT:       %19 = arith.addf %16, %17 : f32
// CHECK-NEXT:       linalg.yield %19 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %15, %9 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

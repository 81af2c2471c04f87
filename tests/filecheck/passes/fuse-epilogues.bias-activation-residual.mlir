// RUN: qc opt -p fuse-epilogues %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %2 = qc.const @w : tensor<8x8xf32>
    %3 = qc.linear %0, %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %4 = qc.const @b : tensor<8xf32>
    %5 = qc.dim "s" : index
    %6 = tensor.empty(%5) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %7 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%3, %4 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>) outs(%6 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%8: f32, %9: f32, %10: f32):
      %11 = arith.addf %8, %9 : f32
      linalg.yield %11 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %12 = qc.dim "s" : index
    %13 = tensor.empty(%12) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %14 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%7 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%13 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%15: f32, %16: f32):
      %17 = math.tanh %15 : f32
      linalg.yield %17 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %18 = qc.dim "s" : index
    %19 = tensor.empty(%18) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %20 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%1, %14 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%19 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%21: f32, %22: f32, %23: f32):
      %24 = arith.addf %21, %22 : f32
      linalg.yield %24 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %20 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %2 = qc.const @w : tensor<8x8xf32>
// CHECK-NEXT:     %3 = qc.const @b : tensor<8xf32>
// CHECK-NEXT:     %4 = tensor.expand_shape %3 [[0 : i64, 1 : i64]] output_shape [1, 8] : tensor<8xf32> into tensor<1x8xf32>
// CHECK-NEXT:     %5 = qc.linear %0, %2 extras(%1, %4) : tensor<?x8xf32, #qc.dims<["s", 8]>> {
// CHECK-NEXT:     ^bb0(%6: f32, %7: f32, %8: f32):
// CHECK-NEXT:       %9 = arith.addf %6, %8 : f32
// CHECK-NEXT:       %10 = math.tanh %9 : f32
// CHECK-NEXT:       %11 = arith.addf %7, %10 : f32
// CHECK-NEXT:       qc.yield %11
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %5 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

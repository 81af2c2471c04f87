// RUN: qc opt -p fuse-routing %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<3x8xf32>) -> (tensor<3x2xf32>, tensor<3x2xi64>) {
    %1 = arith.constant 0.000000e+00 : f32
    %2 = qc.softmax %0 {axis = 1, qc.path = "gate"} : tensor<3x8xf32>
    %3, %4 = qc.topk %2 {k = 2, axis = 1, qc.path = "gate"} : tensor<3x2xf32>, tensor<3x2xi64>
    %5 = tensor.empty() : tensor<3xf32>
    %6 = linalg.fill ins(%1 : f32) outs(%5 : tensor<3xf32>) -> tensor<3xf32>
    %7 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%3 : tensor<3x2xf32>) outs(%6 : tensor<3xf32>) {
    ^bb0(%8: f32, %9: f32):
      %10 = arith.addf %9, %8 : f32
      linalg.yield %10 : f32
    } -> tensor<3xf32>
    %11 = tensor.empty() : tensor<3x2xf32>
    %12 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%3, %7 : tensor<3x2xf32>, tensor<3xf32>) outs(%11 : tensor<3x2xf32>) {
    ^bb0(%13: f32, %14: f32, %15: f32):
      %16 = arith.divf %14, %13 : f32
      linalg.yield %16 : f32
    } -> tensor<3x2xf32>
    func.return %12, %4 : tensor<3x2xf32>, tensor<3x2xi64>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<3x8xf32>) -> (tensor<3x2xf32>, tensor<3x2xi64>) {
// CHECK-NEXT:     %1 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:     %2, %3 = qc.route %0 {k = 2, scores = "all", qc.path = "gate"} : tensor<3x2xf32>, tensor<3x2xi64>
// CHECK-NEXT:     %4 = tensor.empty() : tensor<3xf32>
// CHECK-NEXT:     %5 = linalg.fill ins(%1 : f32) outs(%4 : tensor<3xf32>) -> tensor<3xf32>
// CHECK-NEXT:     %6 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>], iterator_types = ["parallel", "reduction"]} ins(%2 : tensor<3x2xf32>) outs(%5 : tensor<3xf32>) {
// CHECK-NEXT:     ^bb0(%7: f32, %8: f32):
// CHECK-NEXT:       %9 = arith.addf %8, %7 : f32
// CHECK-NEXT:       linalg.yield %9 : f32
// CHECK-NEXT:     } -> tensor<3xf32>
// CHECK-NEXT:     %10 = tensor.empty() : tensor<3x2xf32>
// CHECK-NEXT:     %11 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2, %6 : tensor<3x2xf32>, tensor<3xf32>) outs(%10 : tensor<3x2xf32>) {
// CHECK-NEXT:     ^bb0(%12: f32, %13: f32, %14: f32):
// CHECK-NEXT:       %15 = arith.divf %13, %12 : f32
// CHECK-NEXT:       linalg.yield %15 : f32
// CHECK-NEXT:     } -> tensor<3x2xf32>
// CHECK-NEXT:     func.return %11, %3 : tensor<3x2xf32>, tensor<3x2xi64>
// CHECK-NEXT:   }
// CHECK-NEXT: }

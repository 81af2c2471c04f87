// RUN: qc opt -p raise-idioms %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %1: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %2: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %3: tensor<1x1x?x?xf32, #qc.dims<[1, 1, "s", "s"]>>) -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %4 = qc.dim "s" : index
    %5 = tensor.empty(%4) : tensor<1x2x4x?xf32, #qc.dims<[1, 2, 4, "s"]>>
    %6 = linalg.transpose ins(%1:tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>) outs(%5:tensor<1x2x4x?xf32, #qc.dims<[1, 2, 4, "s"]>>) permutation = [0, 1, 3, 2]
    %7 = qc.batch_matmul %0, %6 : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>
    %8 = qc.dim "s" : index
    %9 = qc.dim "s" : index
    %10 = tensor.empty(%8, %9) : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>
    %11 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%7 : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>) outs(%10 : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>) {
    ^bb0(%12: f32, %13: f32):
      %14 = arith.constant 2.000000e+00 : f32
      %15 = arith.divf %12, %14 : f32
      linalg.yield %15 : f32
    } -> tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>
    %16 = qc.dim "s" : index
    %17 = qc.dim "s" : index
    %18 = tensor.empty(%16, %17) : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>
    %19 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, 0, d2, d3)>, affine_map<(d0, d1, d2, d3) -> (d0, d1, d2, d3)>], iterator_types = ["parallel", "parallel", "parallel", "parallel"]} ins(%11, %3 : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>, tensor<1x1x?x?xf32, #qc.dims<[1, 1, "s", "s"]>>) outs(%18 : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>) {
    ^bb0(%20: f32, %21: f32, %22: f32):
      %23 = arith.addf %20, %21 : f32
      linalg.yield %23 : f32
    } -> tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>
    %24 = qc.softmax %19 {axis = 3} : tensor<1x2x?x?xf32, #qc.dims<[1, 2, "s", "s"]>>
    %25 = qc.batch_matmul %24, %2 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    func.return %25 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %1: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %2: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>, %3: tensor<1x1x?x?xf32, #qc.dims<[1, 1, "s", "s"]>>) -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %4 = qc.attention %0, %1, %2 mask(%3) {scale = 5.000000e-01} : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
// CHECK-NEXT:     func.return %4 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p fold-views -p dce %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>) -> tensor<8x?xf32, #qc.dims<[8, "s"]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %2 = qc.dim "s" : index
    %3 = tensor.empty(%2) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %4 = linalg.transpose ins(%0:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%3:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
    %5 = qc.dim "s" : index
    %6 = tensor.empty(%5) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %7 = linalg.transpose ins(%4:tensor<8x?xf32, #qc.dims<[8, "s"]>>) outs(%6:tensor<?x8xf32, #qc.dims<["s", 8]>>) permutation = [1, 0]
    %8 = qc.dim "s" : index
    %9 = tensor.empty(%8) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %10 = linalg.broadcast ins(%1:tensor<8xf32>) outs(%9:tensor<?x8xf32, #qc.dims<["s", 8]>>) dimensions = [0]
    %11 = qc.dim "s" : index
    %12 = tensor.empty(%11) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %13 = linalg.transpose ins(%7:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%12:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
    %14 = qc.dim "s" : index
    %15 = tensor.empty(%14) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %16 = linalg.transpose ins(%10:tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%15:tensor<8x?xf32, #qc.dims<[8, "s"]>>) permutation = [1, 0]
    %17 = qc.dim "s" : index
    %18 = tensor.empty(%17) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
    %19 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%13, %16 : tensor<8x?xf32, #qc.dims<[8, "s"]>>, tensor<8x?xf32, #qc.dims<[8, "s"]>>) outs(%18 : tensor<8x?xf32, #qc.dims<[8, "s"]>>) {
    ^bb0(%20: f32, %21: f32, %22: f32):
      %23 = arith.addf %20, %21 : f32
      linalg.yield %23 : f32
    } -> tensor<8x?xf32, #qc.dims<[8, "s"]>>
    func.return %19 : tensor<8x?xf32, #qc.dims<[8, "s"]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<8xf32>) -> tensor<8x?xf32, #qc.dims<[8, "s"]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %2 = qc.dim "s" : index
// CHECK-NEXT:     %3 = tensor.empty(%2) : tensor<8x?xf32, #qc.dims<[8, "s"]>>
// CHECK-NEXT:     %4 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d1, d0)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %1 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<8xf32>) outs(%3 : tensor<8x?xf32, #qc.dims<[8, "s"]>>) {
// CHECK-NEXT:     ^bb0(%5: f32, %6: f32, %7: f32):
// CHECK-NEXT:       %8 = arith.addf %5, %6 : f32
// CHECK-NEXT:       linalg.yield %8 : f32
// CHECK-NEXT:     } -> tensor<8x?xf32, #qc.dims<[8, "s"]>>
// CHECK-NEXT:     func.return %4 : tensor<8x?xf32, #qc.dims<[8, "s"]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

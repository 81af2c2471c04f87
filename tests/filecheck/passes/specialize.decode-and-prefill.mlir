// RUN: qc opt -p specialize %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?xi64, #qc.dims<["s"]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 16>}} {
    %2 = qc.state @kv : tensor<16x8xf32>
    %3 = qc.index_update %2, %1, %0 {axis = 0} : tensor<16x8xf32>
    qc.state_update @kv %3
    %4 = qc.dim "s" : index
    %5 = tensor.empty(%4) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %6 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%5 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%7: f32, %8: f32):
      %9 = arith.constant 2.000000e+00 : f32
      %10 = arith.mulf %7, %9 : f32
      linalg.yield %10 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %6 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @"decode[s=1]"(%0: tensor<1x8xf32>, %1: tensor<1xi64>) -> tensor<1x8xf32> {
// CHECK-NEXT:     %2 = qc.state @kv : tensor<16x8xf32>
// CHECK-NEXT:     %3 = qc.index_update %2, %1, %0 {axis = 0} : tensor<16x8xf32>
// CHECK-NEXT:     qc.state_update @kv %3
// CHECK-NEXT:     %4 = tensor.empty() : tensor<1x8xf32>
// CHECK-NEXT:     %5 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<1x8xf32>) outs(%4 : tensor<1x8xf32>) {
// CHECK-NEXT:     ^bb0(%6: f32, %7: f32):
// CHECK-NEXT:       %8 = arith.constant 2.000000e+00 : f32
// CHECK-NEXT:       %9 = arith.mulf %6, %8 : f32
// CHECK-NEXT:       linalg.yield %9 : f32
// CHECK-NEXT:     } -> tensor<1x8xf32>
// CHECK-NEXT:     func.return %5 : tensor<1x8xf32>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func @"prefill[s<=16]"(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>, %1: tensor<?xi64, #qc.dims<["s"]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 16>}} {
// CHECK-NEXT:     %2 = qc.state @kv : tensor<16x8xf32>
// CHECK-NEXT:     %3 = qc.index_update %2, %1, %0 {axis = 0} : tensor<16x8xf32>
// CHECK-NEXT:     qc.state_update @kv %3
// CHECK-NEXT:     %4 = qc.dim "s" : index
// CHECK-NEXT:     %5 = tensor.empty(%4) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %6 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%5 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%7: f32, %8: f32):
// CHECK-NEXT:       %9 = arith.constant 2.000000e+00 : f32
// CHECK-NEXT:       %10 = arith.mulf %7, %9 : f32
// CHECK-NEXT:       linalg.yield %10 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %6 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

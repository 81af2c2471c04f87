// RUN: qc opt -p fuse-epilogues %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @w : tensor<8x8xf32>
    %2 = qc.linear %0, %1 : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %3 = qc.dim "s" : index
    %4 = tensor.empty(%3) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %5 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%4 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%6: f32, %7: f32):
      %8 = math.tanh %6 : f32
      linalg.yield %8 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %5, %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @w : tensor<8x8xf32>
// CHECK-NEXT:     %2 = qc.linear %0, %1 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %3 = qc.dim "s" : index
// CHECK-NEXT:     %4 = tensor.empty(%3) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %5 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%4 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%6: f32, %7: f32):
// CHECK-NEXT:       %8 = math.tanh %6 : f32
// CHECK-NEXT:       linalg.yield %8 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %5, %2 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

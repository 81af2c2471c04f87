// RUN: qc opt -p canonicalize %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = tensor.empty(%1) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %r = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%2 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%4: f32, %5: f32):
      %6 = arith.truncf %4 : f32 to bf16
      %7 = arith.extf %6 : bf16 to f32
      %8 = arith.constant 0.000000e+00 : f32
      %9 = arith.addf %7, %8 : f32
      linalg.yield %9 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.dim "s" : index
// CHECK-NEXT:     %2 = tensor.empty(%1) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %r = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%2 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%3: f32, %4: f32):
// CHECK-NEXT:       %5 = arith.truncf %3 : f32 to bf16
// CHECK-NEXT:       %6 = arith.extf %5 : bf16 to f32
// CHECK-NEXT:       %7 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:       %8 = arith.addf %6, %7 : f32
// CHECK-NEXT:       linalg.yield %8 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p canonicalize %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = tensor.empty(%1) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %3 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %0 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%2 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%4: f32, %5: f32, %6: f32):
      %7 = arith.constant 5.000000e-01 : f32
      %8 = arith.constant 2.000000e+00 : f32
      %9 = arith.mulf %7, %8 : f32
      %10 = arith.mulf %4, %9 : f32
      %11 = arith.extf %10 : f32 to f64
      %12 = arith.truncf %11 : f64 to f32
      %13 = math.exp %12 : f32
      linalg.yield %13 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    %r = qc.softmax %3 {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.dim "s" : index
// CHECK-NEXT:     %2 = tensor.empty(%1) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %3 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0 : tensor<?x8xf32, #qc.dims<["s", 8]>>) outs(%2 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%4: f32, %5: f32):
// CHECK-NEXT:       %6 = math.exp %4 : f32
// CHECK-NEXT:       linalg.yield %6 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %r = qc.softmax %3 {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %r : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

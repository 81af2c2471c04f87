// RUN: qc opt -p fuse-epilogues %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xbf16, #qc.dims<["s", 8]>>, %1: tensor<6x8xbf16>, %2: tensor<?x6xbf16, #qc.dims<["s", 6]>>) -> tensor<?x6xbf16, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %3 = qc.linear %0, %1 : tensor<?x6xbf16, #qc.dims<["s", 6]>>
    %4 = qc.dim "s" : index
    %5 = tensor.empty(%4) : tensor<?x6xbf16, #qc.dims<["s", 6]>>
    %6 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%3, %2 : tensor<?x6xbf16, #qc.dims<["s", 6]>>, tensor<?x6xbf16, #qc.dims<["s", 6]>>) outs(%5 : tensor<?x6xbf16, #qc.dims<["s", 6]>>) {
    ^bb0(%7: bf16, %8: bf16, %9: bf16):
      %10 = arith.extf %7 : bf16 to f32
      %11 = arith.extf %8 : bf16 to f32
      %12 = arith.addf %10, %11 : f32
      %13 = arith.truncf %12 : f32 to bf16
      linalg.yield %13 : bf16
    } -> tensor<?x6xbf16, #qc.dims<["s", 6]>>
    func.return %6 : tensor<?x6xbf16, #qc.dims<["s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xbf16, #qc.dims<["s", 8]>>, %1: tensor<6x8xbf16>, %2: tensor<?x6xbf16, #qc.dims<["s", 6]>>) -> tensor<?x6xbf16, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %3 = qc.linear %0, %1 extras(%2) : tensor<?x6xbf16, #qc.dims<["s", 6]>> {
// CHECK-NEXT:     ^bb0(%4: f32, %5: bf16):
// CHECK-NEXT:       %6 = arith.extf %5 : bf16 to f32
// CHECK-NEXT:       %7 = arith.addf %4, %6 : f32
// CHECK-NEXT:       %8 = arith.truncf %7 : f32 to bf16
// CHECK-NEXT:       qc.yield %8
// CHECK-NEXT:     }
// CHECK-NEXT:     func.return %3 : tensor<?x6xbf16, #qc.dims<["s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

// RUN: qc opt -p fuse-dequant-matmul %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %2 = qc.dequantize %1 : tensor<6x8xf32>
    %3 = tensor.empty() : tensor<6x8xf32>
    %4 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%2 : tensor<6x8xf32>) outs(%3 : tensor<6x8xf32>) {
    ^bb0(%5: f32, %6: f32):
      %7 = arith.constant 2.000000e+00 : f32
      %8 = arith.mulf %5, %7 : f32
      linalg.yield %8 : f32
    } -> tensor<6x8xf32>
    %9 = qc.linear %0, %4 : tensor<?x6xf32, #qc.dims<["s", 6]>>
    func.return %9 : tensor<?x6xf32, #qc.dims<["s", 6]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x6xf32, #qc.dims<["s", 6]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @w : !qc.qtensor<6x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
// CHECK-NEXT:     %2 = tensor.empty() : tensor<6xi64>
// CHECK-NEXT:     %3 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%2 : tensor<6xi64>) {
// CHECK-NEXT:     ^bb0(%4: i64):
// CHECK-NEXT:       %5 = linalg.index 0 : index
// CHECK-NEXT:       %6 = arith.index_cast %5 : index to i64
// CHECK-NEXT:       linalg.yield %6 : i64
// CHECK-NEXT:     } -> tensor<6xi64>
// CHECK-NEXT:     %7 = qc.embedding %3, %1 : tensor<6x8xf32>
// CHECK-NEXT:     %8 = tensor.empty() : tensor<6x8xf32>
// CHECK-NEXT:     %9 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%7 : tensor<6x8xf32>) outs(%8 : tensor<6x8xf32>) {
// CHECK-NEXT:     ^bb0(%10: f32, %11: f32):
// CHECK-NEXT:       %12 = arith.constant 2.000000e+00 : f32
// CHECK-NEXT:       %13 = arith.mulf %10, %12 : f32
// CHECK-NEXT:       linalg.yield %13 : f32
// CHECK-NEXT:     } -> tensor<6x8xf32>
// CHECK-NEXT:     %14 = qc.linear %0, %9 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:     func.return %14 : tensor<?x6xf32, #qc.dims<["s", 6]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

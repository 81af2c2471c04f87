// RUN: qc opt -p raise-idioms -p dce -p raise-idioms %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>) -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = qc.dim "s" : index
    %3 = tensor.empty(%1, %2) : tensor<?x?xi1, #qc.dims<["s", "s"]>>
    %4 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} outs(%3 : tensor<?x?xi1, #qc.dims<["s", "s"]>>) {
    ^bb0(%5: i1):
      %6 = linalg.index 1 : index
      %7 = arith.index_cast %6 : index to i64
      %8 = linalg.index 0 : index
      %9 = arith.index_cast %8 : index to i64
      %10 = arith.cmpi sle, %7, %9 : i64
      linalg.yield %10 : i1
    } -> tensor<?x?xi1, #qc.dims<["s", "s"]>>
    %11 = qc.dim "s" : index
    %12 = qc.dim "s" : index
    %13 = tensor.expand_shape %4 [[0 : i64, 1 : i64, 2 : i64], [3 : i64]] output_shape [1, 1, %11, %12] : tensor<?x?xi1, #qc.dims<["s", "s"]>> into tensor<1x1x?x?xi1, #qc.dims<[1, 1, "s", "s"]>>
    %14 = qc.attention %0, %0, %0 mask(%13) {scale = 5.000000e-01} : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
    func.return %14 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>) -> tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.attention %0, %0, %0 {scale = 5.000000e-01, causal} : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
// CHECK-NEXT:     func.return %1 : tensor<1x2x?x4xf32, #qc.dims<[1, 2, "s", 4]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

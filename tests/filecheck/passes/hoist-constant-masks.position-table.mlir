// RUN: qc opt -p hoist-constant-masks %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.dim "s" : index
    %2 = tensor.empty(%1) : tensor<?xi64, #qc.dims<["s"]>>
    %3 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%2 : tensor<?xi64, #qc.dims<["s"]>>) {
    ^bb0(%4: i64):
      %5 = linalg.index 0 : index
      %6 = arith.index_cast %5 : index to i64
      %7 = arith.muli %6, %6 : i64
      linalg.yield %7 : i64
    } -> tensor<?xi64, #qc.dims<["s"]>>
    %8 = qc.dim "s" : index
    %9 = tensor.empty(%8) : tensor<?xf32, #qc.dims<["s"]>>
    %10 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} ins(%3 : tensor<?xi64, #qc.dims<["s"]>>) outs(%9 : tensor<?xf32, #qc.dims<["s"]>>) {
    ^bb0(%11: i64, %12: f32):
      %13 = arith.sitofp %11 : i64 to f32
      %14 = math.sin %13 : f32
      linalg.yield %14 : f32
    } -> tensor<?xf32, #qc.dims<["s"]>>
    %15 = qc.dim "s" : index
    %16 = tensor.expand_shape %10 [[0 : i64, 1 : i64]] output_shape [%15, 1] : tensor<?xf32, #qc.dims<["s"]>> into tensor<?x1xf32, #qc.dims<["s", 1]>>
    %17 = qc.dim "s" : index
    %18 = tensor.empty(%17) : tensor<?x8xf32, #qc.dims<["s", 8]>>
    %19 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0, 0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %16 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?x1xf32, #qc.dims<["s", 1]>>) outs(%18 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
    ^bb0(%20: f32, %21: f32, %22: f32):
      %23 = arith.mulf %20, %21 : f32
      linalg.yield %23 : f32
    } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
    func.return %19 : tensor<?x8xf32, #qc.dims<["s", 8]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @init() -> tensor<32xf32> attributes {qc.results = ["init.0"]} {
// CHECK-NEXT:     %0 = tensor.empty() : tensor<32xi64>
// CHECK-NEXT:     %1 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} outs(%0 : tensor<32xi64>) {
// CHECK-NEXT:     ^bb0(%2: i64):
// CHECK-NEXT:       %3 = linalg.index 0 : index
// CHECK-NEXT:       %4 = arith.index_cast %3 : index to i64
// CHECK-NEXT:       %5 = arith.muli %4, %4 : i64
// CHECK-NEXT:       linalg.yield %5 : i64
// CHECK-NEXT:     } -> tensor<32xi64>
// CHECK-NEXT:     %6 = tensor.empty() : tensor<32xf32>
// CHECK-NEXT:     %7 = linalg.generic {indexing_maps = [affine_map<(d0) -> (d0)>, affine_map<(d0) -> (d0)>], iterator_types = ["parallel"]} ins(%1 : tensor<32xi64>) outs(%6 : tensor<32xf32>) {
// CHECK-NEXT:     ^bb0(%8: i64, %9: f32):
// CHECK-NEXT:       %10 = arith.sitofp %8 : i64 to f32
// CHECK-NEXT:       %11 = math.sin %10 : f32
// CHECK-NEXT:       linalg.yield %11 : f32
// CHECK-NEXT:     } -> tensor<32xf32>
// CHECK-NEXT:     func.return %7 : tensor<32xf32>
// CHECK-NEXT:   }
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x8xf32, #qc.dims<["s", 8]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %1 = qc.const @init.0 : tensor<32xf32>
// CHECK-NEXT:     %2 = qc.dim "s" : index
// CHECK-NEXT:     %3 = tensor.extract_slice %1[0] [%2] [1] : tensor<32xf32> to tensor<?xf32, #qc.dims<["s"]>>
// CHECK-NEXT:     %4 = qc.dim "s" : index
// CHECK-NEXT:     %5 = tensor.empty(%4) : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %6 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%0, %3 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<?xf32, #qc.dims<["s"]>>) outs(%5 : tensor<?x8xf32, #qc.dims<["s", 8]>>) {
// CHECK-NEXT:     ^bb0(%7: f32, %8: f32, %9: f32):
// CHECK-NEXT:       %10 = arith.mulf %7, %8 : f32
// CHECK-NEXT:       linalg.yield %10 : f32
// CHECK-NEXT:     } -> tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     func.return %6 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

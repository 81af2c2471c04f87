// RUN: qc opt -p lower-qc-to-linalg %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>>) -> tensor<?x4xf32, #qc.dims<["s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %1 = qc.const @w : !qc.qtensor<4x8xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>
    %2 = qc.const @b : tensor<4xf32>
    %r = qc.linear %0, %1 bias(%2) {qc.path = "head"} : tensor<?x4xf32, #qc.dims<["s", 4]>>
    func.return %r : tensor<?x4xf32, #qc.dims<["s", 4]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<?x8xf32, #qc.dims<["s", 8]>> {qc.name = "arg0"}, %1: tensor<32xi8> {qc.name = "w:codes"}, %2: tensor<4xf32> {qc.name = "w:scales"}, %3: tensor<4xf32> {qc.name = "b"}) -> tensor<?x4xf32, #qc.dims<["s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}, qc.constants = ["w:codes", "w:scales", "b"]} {
// CHECK-NEXT:     %4 = tensor.expand_shape %1 [[0 : i64, 1 : i64]] output_shape [4, 8] {qc.path = "head"} : tensor<32xi8> into tensor<4x8xi8>
// CHECK-NEXT:     %5 = tensor.empty() : tensor<4x8xf32>
// CHECK-NEXT:     %6 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%4, %2 : tensor<4x8xi8>, tensor<4xf32>) outs(%5 : tensor<4x8xf32>) attrs =  {qc.path = "head"} {
// CHECK-NEXT:     ^bb0(%7: i8, %8: f32, %9: f32):
// CHECK-NEXT:       %10 = arith.extsi %7 : i8 to i32
// CHECK-NEXT:       %11 = arith.sitofp %10 : i32 to f32
// CHECK-NEXT:       %12 = arith.mulf %11, %8 : f32
// CHECK-NEXT:       linalg.yield %12 : f32
// CHECK-NEXT:     } -> tensor<4x8xf32>
// CHECK-NEXT:     %13 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:     %14 = arith.constant 0 : index
// CHECK-NEXT:     %15 = tensor.dim %0, %14 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %16 = tensor.empty(%15) : tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %17 = linalg.fill {qc.path = "head"} ins(%13 : f32) outs(%16 : tensor<?x4xf32, #qc.dims<["s", 4]>>) -> tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %18 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1)>], iterator_types = ["parallel", "parallel", "reduction"]} ins(%0, %6 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<4x8xf32>) outs(%17 : tensor<?x4xf32, #qc.dims<["s", 4]>>) attrs =  {qc.path = "head"} {
// CHECK-NEXT:     ^bb0(%19: f32, %20: f32, %21: f32):
// CHECK-NEXT:       %22 = arith.mulf %19, %20 : f32
// CHECK-NEXT:       %23 = arith.addf %21, %22 : f32
// CHECK-NEXT:       linalg.yield %23 : f32
// CHECK-NEXT:     } -> tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %24 = arith.constant 0 : index
// CHECK-NEXT:     %25 = tensor.dim %0, %24 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %26 = tensor.empty(%25) : tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %r = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%18, %3 : tensor<?x4xf32, #qc.dims<["s", 4]>>, tensor<4xf32>) outs(%26 : tensor<?x4xf32, #qc.dims<["s", 4]>>) attrs =  {qc.path = "head"} {
// CHECK-NEXT:     ^bb0(%27: f32, %28: f32, %29: f32):
// CHECK-NEXT:       %30 = arith.addf %27, %28 : f32
// CHECK-NEXT:       linalg.yield %30 : f32
// CHECK-NEXT:     } -> tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     func.return %r : tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

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
// CHECK-NEXT:     %4 = tensor.empty() : tensor<4x8xf32>
// CHECK-NEXT:     %5 = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (((d0 * 8) + d1))>, affine_map<(d0, d1) -> (d0)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%1, %2 : tensor<32xi8>, tensor<4xf32>) outs(%4 : tensor<4x8xf32>) attrs =  {qc.path = "head"} {
// CHECK-NEXT:     ^bb0(%6: i8, %7: f32, %8: f32):
// CHECK-NEXT:       %9 = arith.sitofp %6 : i8 to f32
// CHECK-NEXT:       %10 = arith.mulf %9, %7 : f32
// CHECK-NEXT:       linalg.yield %10 : f32
// CHECK-NEXT:     } -> tensor<4x8xf32>
// CHECK-NEXT:     %11 = arith.constant 0.000000e+00 : f32
// CHECK-NEXT:     %12 = arith.constant 0 : index
// CHECK-NEXT:     %13 = tensor.dim %0, %12 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %14 = tensor.empty(%13) : tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %15 = linalg.fill {qc.path = "head"} ins(%11 : f32) outs(%14 : tensor<?x4xf32, #qc.dims<["s", 4]>>) -> tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %16 = linalg.generic {indexing_maps = [affine_map<(d0, d1, d2) -> (d0, d2)>, affine_map<(d0, d1, d2) -> (d1, d2)>, affine_map<(d0, d1, d2) -> (d0, d1)>], iterator_types = ["parallel", "parallel", "reduction"]} ins(%0, %5 : tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<4x8xf32>) outs(%15 : tensor<?x4xf32, #qc.dims<["s", 4]>>) attrs =  {qc.path = "head"} {
// CHECK-NEXT:     ^bb0(%17: f32, %18: f32, %19: f32):
// CHECK-NEXT:       %20 = arith.mulf %17, %18 : f32
// CHECK-NEXT:       %21 = arith.addf %19, %20 : f32
// CHECK-NEXT:       linalg.yield %21 : f32
// CHECK-NEXT:     } -> tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %22 = arith.constant 0 : index
// CHECK-NEXT:     %23 = tensor.dim %0, %22 : tensor<?x8xf32, #qc.dims<["s", 8]>>
// CHECK-NEXT:     %24 = tensor.empty(%23) : tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     %r = linalg.generic {indexing_maps = [affine_map<(d0, d1) -> (d0, d1)>, affine_map<(d0, d1) -> (d1)>, affine_map<(d0, d1) -> (d0, d1)>], iterator_types = ["parallel", "parallel"]} ins(%16, %3 : tensor<?x4xf32, #qc.dims<["s", 4]>>, tensor<4xf32>) outs(%24 : tensor<?x4xf32, #qc.dims<["s", 4]>>) attrs =  {qc.path = "head"} {
// CHECK-NEXT:     ^bb0(%25: f32, %26: f32, %27: f32):
// CHECK-NEXT:       %28 = arith.addf %25, %26 : f32
// CHECK-NEXT:       linalg.yield %28 : f32
// CHECK-NEXT:     } -> tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:     func.return %r : tensor<?x4xf32, #qc.dims<["s", 4]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

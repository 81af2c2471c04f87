// RUN: qc opt -p fold-views -p dce %s | filecheck %s
builtin.module {
  func.func @main(%0: tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>, %1: tensor<2x2x?x4xf32, #qc.dims<[2, 2, "s", 4]>>, %2: tensor<2x2x?x4xf32, #qc.dims<[2, 2, "s", 4]>>, %3: tensor<2x1x1x?xi1, #qc.dims<[2, 1, 1, "s"]>>) -> tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
    %4 = qc.dim "s" : index
    %5 = tensor.empty(%4) : tensor<2x2x3x?x4xf32, #qc.dims<[2, 2, 3, "s", 4]>>
    %6 = linalg.broadcast ins(%1:tensor<2x2x?x4xf32, #qc.dims<[2, 2, "s", 4]>>) outs(%5:tensor<2x2x3x?x4xf32, #qc.dims<[2, 2, 3, "s", 4]>>) dimensions = [2]
    %7 = tensor.collapse_shape %6 [[0 : i64], [1 : i64, 2 : i64], [3 : i64], [4 : i64]] : tensor<2x2x3x?x4xf32, #qc.dims<[2, 2, 3, "s", 4]>> into tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>
    %8 = qc.dim "s" : index
    %9 = tensor.empty(%8) : tensor<2x2x3x?x4xf32, #qc.dims<[2, 2, 3, "s", 4]>>
    %10 = linalg.broadcast ins(%2:tensor<2x2x?x4xf32, #qc.dims<[2, 2, "s", 4]>>) outs(%9:tensor<2x2x3x?x4xf32, #qc.dims<[2, 2, 3, "s", 4]>>) dimensions = [2]
    %11 = tensor.collapse_shape %10 [[0 : i64], [1 : i64, 2 : i64], [3 : i64], [4 : i64]] : tensor<2x2x3x?x4xf32, #qc.dims<[2, 2, 3, "s", 4]>> into tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>
    %12 = tensor.collapse_shape %3 [[0 : i64, 1 : i64, 2 : i64], [3 : i64]] : tensor<2x1x1x?xi1, #qc.dims<[2, 1, 1, "s"]>> into tensor<2x?xi1, #qc.dims<[2, "s"]>>
    %13 = qc.dim "s" : index
    %14 = qc.dim "s" : index
    %15 = tensor.empty(%13, %14) : tensor<2x6x?x?xi1, #qc.dims<[2, 6, "s", "s"]>>
    %16 = linalg.broadcast ins(%12:tensor<2x?xi1, #qc.dims<[2, "s"]>>) outs(%15:tensor<2x6x?x?xi1, #qc.dims<[2, 6, "s", "s"]>>) dimensions = [1, 2]
    %17 = qc.attention %0, %7, %11 mask(%16) {scale = 5.000000e-01} : tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>
    func.return %17 : tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>
  }
}

// CHECK: builtin.module {
// CHECK-NEXT:   func.func @main(%0: tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>, %1: tensor<2x2x?x4xf32, #qc.dims<[2, 2, "s", 4]>>, %2: tensor<2x2x?x4xf32, #qc.dims<[2, 2, "s", 4]>>, %3: tensor<2x1x1x?xi1, #qc.dims<[2, 1, 1, "s"]>>) -> tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>> attributes {qc.ranges = {s = array<i64: 1, 32>}} {
// CHECK-NEXT:     %4 = qc.attention %0, %1, %2 mask(%3) {scale = 5.000000e-01} : tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>
// CHECK-NEXT:     func.return %4 : tensor<2x6x?x4xf32, #qc.dims<[2, 6, "s", 4]>>
// CHECK-NEXT:   }
// CHECK-NEXT: }

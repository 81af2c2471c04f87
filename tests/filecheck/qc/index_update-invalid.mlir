// CHECK: index needs rank 1, not 2
%x, %i, %s = "test.op"() : () -> (tensor<2x5x3xf32>, tensor<2x1xi64>, tensor<2x2x3xf32>)
%0 = qc.index_update %x, %i, %s {axis = 1} : tensor<2x5x3xf32>

// -----

// CHECK: axis 3 is out of range
%x, %i, %s = "test.op"() : () -> (tensor<2x5x3xf32>, tensor<2xi64>, tensor<2x2x3xf32>)
%0 = qc.index_update %x, %i, %s {axis = 3} : tensor<2x5x3xf32>

// -----

// CHECK: src must have shape (2, 2, 3)
%x, %i, %s = "test.op"() : () -> (tensor<2x5x3xf32>, tensor<2xi64>, tensor<2x3x3xf32>)
%0 = qc.index_update %x, %i, %s {axis = 1} : tensor<2x5x3xf32>

// -----

// CHECK: index must be i32 or i64
%x, %i, %s = "test.op"() : () -> (tensor<2x5x3xf32>, tensor<2xf32>, tensor<2x2x3xf32>)
%0 = qc.index_update %x, %i, %s {axis = 1} : tensor<2x5x3xf32>

// -----

// CHECK: x and src differ in element type
%x, %i, %s = "test.op"() : () -> (tensor<2x5x3xf32>, tensor<2xi64>, tensor<2x2x3xf16>)
%0 = qc.index_update %x, %i, %s {axis = 1} : tensor<2x5x3xf32>

// -----

// CHECK: the result must have x's type
%x, %i, %s = "test.op"() : () -> (tensor<2x5x3xf32>, tensor<2xi64>, tensor<2x2x3xf32>)
%0 = qc.index_update %x, %i, %s {axis = 1} : tensor<2x5x3xf16>

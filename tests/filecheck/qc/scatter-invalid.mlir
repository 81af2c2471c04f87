// CHECK: reduce must be one of ('none', 'add', 'mul', 'max', 'min'), not 'mean'
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<3x6xi64>, tensor<3x6xf32>)
%0 = qc.scatter %x, %i, %s {axis = 0, reduce = "mean"} : tensor<4x6xf32>

// -----

// CHECK: ranks 2, 1 and 2 must be equal
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<3xi64>, tensor<3x6xf32>)
%0 = qc.scatter %x, %i, %s {axis = 0, reduce = "add"} : tensor<4x6xf32>

// -----

// CHECK: axis 2 is out of range
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<3x6xi64>, tensor<3x6xf32>)
%0 = qc.scatter %x, %i, %s {axis = 2, reduce = "add"} : tensor<4x6xf32>

// -----

// CHECK: index of shape (5, 6) is larger than src
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<5x6xi64>, tensor<3x6xf32>)
%0 = qc.scatter %x, %i, %s {axis = 0, reduce = "add"} : tensor<4x6xf32>

// -----

// CHECK: index must be i32 or i64
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<3x6xf32>, tensor<3x6xf32>)
%0 = qc.scatter %x, %i, %s {axis = 0, reduce = "add"} : tensor<4x6xf32>

// -----

// CHECK: x and src differ in element type
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<3x6xi64>, tensor<3x6xbf16>)
%0 = qc.scatter %x, %i, %s {axis = 0, reduce = "add"} : tensor<4x6xf32>

// -----

// CHECK: the result must have x's type
%x, %i, %s = "test.op"() : () -> (tensor<4x6xf32>, tensor<3x6xi64>, tensor<3x6xf32>)
%0 = qc.scatter %x, %i, %s {axis = 0, reduce = "add"} : tensor<3x6xf32>

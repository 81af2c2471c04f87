// CHECK: axis -1 is out of range
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.cumsum %x {axis = -1} : tensor<3x8xf32>

// -----

// CHECK: the result must have shape (3, 8)
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.cumsum %x {axis = 0} : tensor<8xf32>

// -----

// CHECK: reduce must be one of ('add', 'mul', 'max', 'min', 'logaddexp'), not 'mean'
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.cumsum %x {axis = 0, reduce = "mean"} : tensor<3x8xf32>

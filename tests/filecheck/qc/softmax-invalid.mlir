// CHECK: axis 2 is out of range
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.softmax %x {axis = 2} : tensor<3x8xf32>

// -----

// CHECK: input and result differ in shape
%x = "test.op"() : () -> tensor<3x8xf32>
%0 = qc.softmax %x {axis = 1} : tensor<3x7xf32>

// -----

// CHECK: is not #qc.dims
%x = "test.op"() : () -> tensor<3x8xf32, "row-major">
%0 = qc.softmax %x {axis = 1} : tensor<3x8xf32, "row-major">

// -----

// CHECK: #qc.dims has 1 entries for a tensor of rank 2
%x = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s"]>>
%0 = qc.softmax %x {axis = 1} : tensor<?x8xf32, #qc.dims<["s"]>>

// -----

// CHECK: #qc.dims entry 9 does not fit the size 8
%x = "test.op"() : () -> tensor<?x8xf32, #qc.dims<["s", 9]>>
%0 = qc.softmax %x {axis = 1} : tensor<?x8xf32, #qc.dims<["s", 9]>>

// -----

// CHECK: has a dynamic dimension without a #qc.dims name
%x = "test.op"() : () -> tensor<?x8xf32>
%0 = qc.softmax %x {axis = 1} : tensor<?x8xf32>

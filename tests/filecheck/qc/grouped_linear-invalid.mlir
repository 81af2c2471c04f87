// CHECK: index must be i64 or i32
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<15x8xf32>, tensor<7xf32>)
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 1} : tensor<7x5xf32>

// -----

// CHECK: 15 rows of w are not a multiple of 4 experts
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<15x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 4, repeat = 1} : tensor<7x5xf32>

// -----

// CHECK: x has K = 9 but w has K = 8
%x, %w, %i = "test.op"() : () -> (tensor<7x9xf32>, tensor<15x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 1} : tensor<7x5xf32>

// -----

// CHECK: x and w need rank 2, index rank 1
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<3x5x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 1} : tensor<7x5xf32>

// -----

// CHECK: index must hold 14 entries, 2 for each row of x, not 7
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<15x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 2} : tensor<7x5xf32>

// -----

// CHECK: 0 experts and 1 pairs per row must be positive
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<15x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 0, repeat = 1} : tensor<7x5xf32>

// -----

// CHECK: the result must have shape (7, 5)
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<15x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 1} : tensor<7x8xf32>

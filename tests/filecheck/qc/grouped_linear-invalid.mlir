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

// -----

// CHECK: the epilogue is missing
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<18x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 1, pairs} : tensor<7x3xf32>

// -----

// CHECK: pairs of rows need two halves of them, an expert has 5 rows
%x, %w, %i = "test.op"() : () -> (tensor<7x8xf32>, tensor<15x8xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 3, repeat = 1, pairs} : tensor<7x2xf32>

// -----

// CHECK: 7 pairs are not a known multiple of the 2 whose results are one row
%x, %w, %i, %p = "test.op"() : () -> (tensor<7x8xf32>, tensor<15x8xf32>, tensor<7xi64>, tensor<3x2xf32>)
%0 = qc.grouped_linear %x, %w, %i weights(%p) {experts = 3, repeat = 1, top = 2} : tensor<3x5xf32>

// -----

// CHECK: mix has arguments ['f32', 'f32'], expected ['f32', 'f32', 'f32']
%x, %w, %i, %p = "test.op"() : () -> (tensor<8x8xf32>, tensor<15x8xf32>, tensor<8xi64>, tensor<4x2xf32>)
%0 = qc.grouped_linear %x, %w, %i weights(%p) {experts = 3, repeat = 1, top = 2} : tensor<4x5xf32> mix {
^bb0(%s: f32, %t: f32):
  qc.yield %t
} {
^bb0(%u: f32):
  qc.yield %u
}

// -----

// CHECK: rows of int8 of K = 64 have 96 bytes, x has 64
%x, %w, %i = "test.op"() : () -> (tensor<7x64xi8>, !qc.qtensor<12x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 4, repeat = 1} : tensor<7x3xf32>

// -----

// CHECK: rows of int8 are multiplied with a quantised weight
%x, %w, %i = "test.op"() : () -> (tensor<7x96xi8>, tensor<12x64xf32>, tensor<7xi64>)
%0 = qc.grouped_linear %x, %w, %i {experts = 4, repeat = 1} : tensor<7x3xf32>

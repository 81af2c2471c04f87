// CHECK: kind must be one of lstm, gru, tanh, relu, not 'mgu'
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "mgu"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: x needs rank 3 and w rank 2, not 2 and 2
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: 22 rows of w are not 4 gates of one size
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<22x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: x has 16 columns, w has 20 rows
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x16xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: only an LSTM has a projection, not 'relu'
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0 = qc.recurrent %x, %w, %h projection(%p) {kind = "relu"} : tensor<7x2x5xf32>

// -----

// CHECK: an LSTM, and nothing else, has cell_start
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: an LSTM, and nothing else, has cell_start
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "tanh"} : tensor<7x2x5xf32>

// -----

// CHECK: w has 3 columns, the state has 5
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x3xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: projection must be (5, 5)
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h projection(%p) cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: bias must have shape (20,), not (5,)
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<5xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h bias(%b) cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: start must have shape (2, 5), not (1, 5)
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<1x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: cell_start must have shape (2, 5), not (2, 3)
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x3xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xf32>

// -----

// CHECK: there must be 2 results: out, cell
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>

// -----

// CHECK: out must have shape (7, 2, 5), not (2, 7, 5)
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<2x7x5xf32>, tensor<2x5xf32>

// -----

// CHECK: cell must be f32, as what it begins with
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x5xf32>, tensor<2x5xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1 = qc.recurrent %x, %w, %h cell_start(%c) {kind = "lstm"} : tensor<7x2x5xf32>, tensor<2x5xbf16>

// -----

// CHECK: room must be f32
%x, %w, %h, %p, %b, %c = "test.op"() : () -> (tensor<7x2x20xf32>, tensor<20x3xf32>, tensor<2x3xf32>, tensor<3x5xf32>, tensor<20xf32>, tensor<2x5xf32>)
%0, %1, %2 = qc.recurrent %x, %w, %h projection(%p) cell_start(%c) {kind = "lstm"} : tensor<7x2x3xf32>, tensor<2x5xf32>, tensor<2x5xf16>

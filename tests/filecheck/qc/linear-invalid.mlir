// CHECK: x has K = 32 but w has K = 64
%x, %w = "test.op"() : () -> (tensor<2x32xf32>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>)
%0 = qc.linear %x, %w : tensor<2x4xf32>

// -----

// CHECK: the result must have shape ('s', 4)
%x, %w, %b = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<4xf32>)
%0 = qc.linear %x, %w : tensor<?x5xf32, #qc.dims<["s", 5]>>

// -----

// CHECK: bias must have shape (4,)
%x, %w, %b = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<5xf32>)
%0 = qc.linear %x, %w bias(%b) : tensor<?x4xf32, #qc.dims<["s", 4]>>

// -----

// CHECK: extra inputs without an epilogue
%x, %w, %e = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<1x4xf32>)
%0 = qc.linear %x, %w extras(%e) : tensor<?x4xf32, #qc.dims<["s", 4]>>

// -----

// CHECK: does not broadcast to
%x, %w, %e = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<2x4xf32>)
%0 = qc.linear %x, %w extras(%e) : tensor<?x4xf32, #qc.dims<["s", 4]>> {
^bb0(%acc: f32, %extra: f32):
  qc.yield %acc
}

// -----

// CHECK: epilogue arguments are ['f64'], expected ['f32']
%x, %w, %b = "test.op"() : () -> (tensor<?x64xf32, #qc.dims<["s", 64]>>, !qc.qtensor<4x64xf32, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>, tensor<4xf32>)
%0 = qc.linear %x, %w : tensor<?x4xf32, #qc.dims<["s", 4]>> {
^bb0(%acc: f64):
  %1 = arith.truncf %acc : f64 to f32
  qc.yield %1
}

// -----

// CHECK: rows of int8 of K = 64 have 96 bytes, x has 64
%x, %w = "test.op"() : () -> (tensor<2x64xi8>, !qc.qtensor<4x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>)
%0 = qc.linear %x, %w : tensor<2x4xf32>

// -----

// CHECK: rows of int8 are multiplied with a quantised weight
%x, %w = "test.op"() : () -> (tensor<2x96xi8>, tensor<4x64xf32>)
%0 = qc.linear %x, %w : tensor<2x4xf32>

// -----

// CHECK: pairs of rows need two halves of them, w has 3 rows
%x, %w = "test.op"() : () -> (tensor<2x64xf32>, tensor<3x64xf32>)
%0 = qc.linear %x, %w {pairs} : tensor<2x1xf32> {
^bb0(%gate: f32, %up: f32):
  qc.yield %gate
}

// -----

// CHECK: pairs of rows need an epilogue that combines them
%x, %w = "test.op"() : () -> (tensor<2x64xf32>, tensor<4x64xf32>)
%0 = qc.linear %x, %w {pairs} : tensor<2x2xf32>

// -----

// CHECK: the result must have shape (2, 2), not (2, 4)
%x, %w = "test.op"() : () -> (tensor<2x64xf32>, tensor<4x64xf32>)
%0 = qc.linear %x, %w {pairs} : tensor<2x4xf32> {
^bb0(%gate: f32, %up: f32):
  qc.yield %gate
}

// -----

// CHECK: epilogue arguments are ['f32'], expected ['f32', 'f32']
%x, %w = "test.op"() : () -> (tensor<2x64xf32>, tensor<4x64xf32>)
%0 = qc.linear %x, %w {pairs} : tensor<2x2xf32> {
^bb0(%acc: f32):
  qc.yield %acc
}

// -----

// CHECK: operands or rows of a norm without a prologue
%x, %w, %g = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>, tensor<8xf32>)
%0 = qc.linear %x, %w affine(%g) : tensor<2x4xf32>

// -----

// CHECK: the prologue's arguments are x and `affine`, as they are
%x, %w, %g = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>, tensor<8xf32>)
%0 = qc.linear %x, %w affine(%g) : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %normed
}

// -----

// CHECK: a prologue is norms of its arguments, or rows of int8, or these of those, and a qc.yield of the result
%x, %w = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>)
%0 = qc.linear %x, %w : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %normed = qc.softmax %rows {axis = 1} : tensor<2x8xf32>
  qc.yield %normed
}

// -----

// CHECK: a prologue is norms of its arguments, or rows of int8, or these of those, and a qc.yield of the result
%x, %w = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>)
%0 = qc.linear %x, %w : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %rows
}

// -----

// CHECK: the norm gives tensor<2x8xbf16>, and x is tensor<2x8xf32>
%x, %w = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>)
%0 = qc.linear %x, %w : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xbf16>
  qc.yield %normed
}

// -----

// CHECK: rows of int8 are multiplied with a quantised weight
%x, %w = "test.op"() : () -> (tensor<2x64xf32>, tensor<4x64xf32>)
%0 = qc.linear %x, %w : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x64xf32>):
  %codes = qc.quantize_rows %rows {kind = "token", value = 0.000000e+00} : tensor<2x96xi8>
  qc.yield %codes
}

// -----

// CHECK: behind which the first norm's, or the rows of int8, may stand again
%x, %w = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>)
%0, %kept = qc.linear %x, %w : tensor<2x4xf32>, tensor<2x8xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %normed, %rows
}

// -----

// CHECK: behind which the first norm's, or the rows of int8, may stand again
%x, %w = "test.op"() : () -> (tensor<2x64xf32>, !qc.qtensor<4x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>)
%0, %kept = qc.linear %x, %w : tensor<2x4xf32>, tensor<2x96xi8> prologue {
^bb0(%rows: tensor<2x64xf32>):
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x64xf32>
  %codes = qc.quantize_rows %normed {kind = "token", value = 0.000000e+00} : tensor<2x96xi8>
  qc.yield %codes, %normed
}

// -----

// CHECK: `kept` are the rows that the region gives
%x, %w = "test.op"() : () -> (tensor<2x64xf32>, !qc.qtensor<4x64xf32, #qc.format<"int8", {}>, #qc.layout<"canonical">>)
%0, %kept = qc.linear %x, %w : tensor<2x4xf32>, tensor<2x64xi8> prologue {
^bb0(%rows: tensor<2x64xf32>):
  %codes = qc.quantize_rows %rows {kind = "token", value = 0.000000e+00} : tensor<2x96xi8>
  qc.yield %codes, %codes
}

// -----

// CHECK: `kept` are the rows that the region gives
%x, %w = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>)
%0, %kept = qc.linear %x, %w : tensor<2x4xf32>, tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %normed, %normed
}

// -----

// CHECK: a prologue has one norm, or one with a residual and then one without
%x, %w = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>)
%0 = qc.linear %x, %w : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>):
  %first = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xf32>
  %second = qc.rms_norm %first {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %second
}

// -----

// CHECK: a prologue is norms of its arguments, or rows of int8, or these of those, and a qc.yield of the result
%x, %w, %h = "test.op"() : () -> (tensor<2x8xf32>, tensor<4x8xf32>, tensor<2x8xf32>)
%0 = qc.linear %x, %w affine(%h) : tensor<2x4xf32> prologue {
^bb0(%rows: tensor<2x8xf32>, %residual: tensor<2x8xf32>):
  %sum = qc.rms_norm %rows residual(%residual) {eps = 1.000000e-05} : tensor<2x8xf32>
  %normed = qc.rms_norm %rows {eps = 1.000000e-05} : tensor<2x8xf32>
  qc.yield %normed
}

// -----

// CHECK: the residual must be tensor<2x8xf32>, as the result is
%x, %h = "test.op"() : () -> (tensor<2x8xf32>, tensor<1x8xf32>)
%0 = qc.layer_norm %x residual(%h) {eps = 1.000000e-05} : tensor<2x8xf32>

// -----

// CHECK: statistics are those of a layer or an rms norm
%x, %w = "test.op"() : () -> (tensor<9x8xf32>, tensor<40x8xf32>)
%0, %s = qc.linear %x, %w {statistics = "mean"} : tensor<9x40xf32>, tensor<9x4xf32>

// -----

// CHECK: the statistics' type must be tensor<9x4xf32>
%x, %w = "test.op"() : () -> (tensor<9x8xf32>, tensor<40x8xf32>)
%0, %s = qc.linear %x, %w {statistics = "layer"} : tensor<9x40xf32>, tensor<9x2xf32>

// -----

// CHECK: the statistics' type must be tensor<9x2xf32>
%x, %w = "test.op"() : () -> (tensor<9x8xf32>, tensor<40x8xf32>)
%0 = qc.linear %x, %w {statistics = "rms"} : tensor<9x40xf32>

// -----

// CHECK: a linear with statistics multiplies floats and combines no pairs
%x, %w = "test.op"() : () -> (tensor<9x8xf32>, tensor<40x8xf32>)
%0, %s = qc.linear %x, %w {pairs, statistics = "rms"} : tensor<9x20xf32>, tensor<9x1xf32> {
^bb0(%a: f32, %b: f32):
  qc.yield %a
}

// -----

// CHECK: the statistics must be tensor<9x2xf32>, not tensor<9x1xf32>
%x, %s = "test.op"() : () -> (tensor<9x8xf32>, tensor<9x1xf32>)
%0 = qc.layer_norm %x statistics(%s) {eps = 1.000000e-05} : tensor<9x8xf32>

// -----

// CHECK: a norm of given statistics has no residual
%x, %s = "test.op"() : () -> (tensor<9x8xf32>, tensor<9x1xf32>)
%0 = qc.rms_norm %x residual(%x) statistics(%s) {eps = 1.000000e-05} : tensor<9x8xf32>

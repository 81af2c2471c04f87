func.func @main() -> (tensor<4xf32>, !qc.qtensor<4x64xbf16, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>) {
  // CHECK: qc.const @encoder.bias {qc.path = "encoder"} : tensor<4xf32>
  %0 = qc.const @encoder.bias {qc.path = "encoder"} : tensor<4xf32>
  // CHECK: qc.const @w : !qc.qtensor<4x64xbf16, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
  %1 = qc.const @w : !qc.qtensor<4x64xbf16, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
  func.return %0, %1 : tensor<4xf32>, !qc.qtensor<4x64xbf16, #qc.format<"nf4", {block = 64 : i64}>, #qc.layout<"canonical">>
}

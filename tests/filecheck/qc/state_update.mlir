%0 = qc.state @kv : tensor<2x8xf32>
// CHECK: qc.state_update @kv %0{{$}}
qc.state_update @kv %0

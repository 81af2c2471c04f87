// CHECK: a state has a static shape
%0 = qc.state @kv : tensor<?x8xf32, #qc.dims<["s", 8]>>

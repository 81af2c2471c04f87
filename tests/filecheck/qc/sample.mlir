// RUN: qc opt %s | filecheck %s

%x, %how, %marks = "test.op"() : () -> (tensor<?x8xf32, #qc.dims<["s", 8]>>, tensor<2x10xi64>, tensor<2x8xf32>)
// CHECK: qc.sample %x, %how, %marks, %marks : tensor<2xi64>
%0 = qc.sample %x, %how, %marks, %marks : tensor<2xi64>

// RUN: qc opt %s | filecheck %s

%x = "test.op"() : () -> tensor<3xf32>
// CHECK: qc.torch_call "aten.foo.default" %x, %x {arguments = "[0, 1]"} : tensor<3xf32>, tensor<1xi64>
%0, %1 = qc.torch_call "aten.foo.default" %x, %x {arguments = "[0, 1]"} : tensor<3xf32>, tensor<1xi64>

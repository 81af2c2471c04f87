// RUN: qc opt %s | filecheck %s

%x = "test.op"() : () -> tensor<3xf32>
// CHECK: qc.torch_call "aten.foo.default" %x, %x {region = {inputs = 2 : i64, ops = [{target = "aten.foo.default", args = [{v = 0 : i64}, {v = 1 : i64}, true, 5.000000e-01 : f64, unit, "word"], results = 2 : i64}], outputs = [2 : i64, 3 : i64]}, sizes = ["s", "4"]} : tensor<3xf32>, tensor<1xi64>
%0, %1 = qc.torch_call "aten.foo.default" %x, %x {region = {inputs = 2 : i64, ops = [{target = "aten.foo.default", args = [{v = 0 : i64}, {v = 1 : i64}, true, 5.000000e-01 : f64, unit, "word"], results = 2 : i64}], outputs = [2 : i64, 3 : i64]}, sizes = ["s", "4"]} : tensor<3xf32>, tensor<1xi64>

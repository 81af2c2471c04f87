// CHECK: property 'region' expected
%x = "test.op"() : () -> tensor<3xf32>
%0 = qc.torch_call "aten.foo.default" %x : tensor<3xf32>

// -----

// CHECK: takes 2 tensors and gives 1; its step passes 1 and takes 1
%x = "test.op"() : () -> tensor<3xf32>
%0 = qc.torch_call "aten.foo.default" %x {region = {inputs = 2 : i64, ops = [{target = "aten.foo.default"}], outputs = [2 : i64]}, sizes = []} : tensor<3xf32>

// -----

// CHECK: gives a value that it does not have
%x = "test.op"() : () -> tensor<3xf32>
%0 = qc.torch_call "aten.foo.default" %x {region = {inputs = 1 : i64, ops = [{target = "aten.foo.default"}], outputs = [2 : i64]}, sizes = []} : tensor<3xf32>

// -----

// CHECK: has the argument "{'v': 1}", which regions lack
%x = "test.op"() : () -> tensor<3xf32>
%0 = qc.torch_call "aten.foo.default" %x {region = {inputs = 1 : i64, ops = [{target = "aten.foo.default", args = [{v = 1 : i64}]}], outputs = [1 : i64]}, sizes = []} : tensor<3xf32>

// -----

// CHECK: the region of torch operators is malformed
%x = "test.op"() : () -> tensor<3xf32>
%0 = qc.torch_call "aten.foo.default" %x {region = {inputs = 1 : i64}, sizes = []} : tensor<3xf32>

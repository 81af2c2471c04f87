// CHECK: qc.dim "b*s" : index
%0 = qc.dim "b*s" : index
// CHECK: qc.dim "max(2*s, t)" : index
%1 = qc.dim "max(2*s, t)" : index

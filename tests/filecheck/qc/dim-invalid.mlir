// CHECK: is not canonical; write 'b*s'
%0 = qc.dim "s*b" : index

// -----

// CHECK: uses something other than
%0 = qc.dim "s**2" : index

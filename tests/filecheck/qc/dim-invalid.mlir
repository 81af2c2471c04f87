// RUN: xdsl-opt --split-input-file --parsing-diagnostics --verify-diagnostics %s | filecheck %s

// CHECK: is not canonical; write 'b*s'
%0 = qc.dim "s*b" : index

// -----

// CHECK: uses something other than
%0 = qc.dim "s**2" : index

// CHECK: property 'nbytes' expected in
rt.buffer @b0 {arena = @act}

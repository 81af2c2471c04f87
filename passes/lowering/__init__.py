"""Building blocks of lower-to-rt and emit-kernels: strided views, kernel operands, scalar bodies."""

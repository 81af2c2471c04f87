"""C++ kernels for the CPU: one module per template, headers, and the emitter of whole programs."""

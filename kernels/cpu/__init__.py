"""C++ kernels for the CPU: one module per template, the headers, and the emitter of whole programs."""

"""The simulated GPU: the host's compiler compiles CUDA C++, each thread is a fiber, and every access is checked."""

"""The simulated GPU: CUDA C++ compiled by the host's compiler, one fiber per thread, every access checked."""

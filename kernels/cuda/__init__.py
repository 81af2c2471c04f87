"""CUDA C++ from KernelSpecs, for every architecture and for the simulated GPU."""

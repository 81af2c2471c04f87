"""Where ops, constants and states live, and which sizes a device's kernels support."""

"""Where ops, constants and states live, and what a device's kernels can take."""

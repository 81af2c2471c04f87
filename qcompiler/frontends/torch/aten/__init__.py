"""One module for each family of ATen operators: how each is built from `qc`, `linalg` and `tensor`."""

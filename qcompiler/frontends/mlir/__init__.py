"""MLIR as models: texts in StableHLO, torch-mlir's torch dialect, and linalg on tensors."""

"""`torch.ops.qc`: storage formats and rows of int8 as torch operators, for graphs that run in eager torch."""

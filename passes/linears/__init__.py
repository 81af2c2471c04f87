"""Linears that read the same rows: their weights put together, and what their results are read by."""

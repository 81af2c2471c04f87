"""Compiled encoders: C++ that writes the bytes of `Format.encode`, tile by tile (source.py prints it for a format)."""

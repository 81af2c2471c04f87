"""Reads, edits, fuses and traces `linalg.generic` ops."""

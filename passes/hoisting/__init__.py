"""Finds what depends on no input, and builds the `@init` function that computes it once."""

"""What depends on no input, and the `@init` function that computes it once."""

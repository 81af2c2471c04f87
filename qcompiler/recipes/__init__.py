"""`qc.search`: recipes that spend a budget of bits, bytes or accuracy."""

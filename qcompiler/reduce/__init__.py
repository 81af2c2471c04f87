"""`qc reduce`: the smallest IR that still fails in the same way."""

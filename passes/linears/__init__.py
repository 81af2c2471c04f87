"""Building blocks of merge-linears: stacked weights, and the copies that a merge would cause."""

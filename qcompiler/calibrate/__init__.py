"""Algorithms that choose the codes of a matrix by data. Each ends in ordinary codes of an ordinary format."""

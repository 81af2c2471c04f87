"""Quantises weights and activations of a captured graph: recipes, encoding, calibration, adapters."""

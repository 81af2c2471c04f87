"""Weights and activations of a captured graph become quantised: recipes, encoding, calibration, adapters."""

"""The door for JAX: a jittable function, exported to StableHLO, as a module of qc and linalg."""

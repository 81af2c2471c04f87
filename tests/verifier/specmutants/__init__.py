"""Mutants of what a plan says beside its schedule: kernels, views, sizes, memory, init, states, entries."""

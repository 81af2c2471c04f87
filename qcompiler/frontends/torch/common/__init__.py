"""Shared by all parts of this frontend: places in the user's program, symbolic sizes, names of dtypes."""

"""Devices behind one small interface: `cpu`, `sim:N`, `cuda:N`."""

"""Rewrites of the float graph that keep what it computes, before its weights are encoded."""

"""Attention masks: what they keep, proven or computed."""

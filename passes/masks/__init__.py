"""Attention masks: which keys a mask keeps, proven from its expression or computed."""

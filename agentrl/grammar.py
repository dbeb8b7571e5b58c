"""Constrained decoding, shared by engines and the update core."""

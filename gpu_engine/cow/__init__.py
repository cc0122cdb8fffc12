"""Concurrent checkpoints by copy-on-write."""

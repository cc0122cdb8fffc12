"""Restore protocols: bringing processes back from an image (DESIGN §4)."""

"""The stop protocol: the processes stand still while their GPU memory is copied (DESIGN §4)."""

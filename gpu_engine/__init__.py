"""The GPU engine: everything that touches GPU memory or the driver on behalf of a checkpoint or a restore."""

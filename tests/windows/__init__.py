"""Random programs in windows of concurrent checkpoints: thousands of them in minutes, because no CRIU is in the way."""

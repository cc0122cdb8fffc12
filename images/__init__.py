"""The image set: its format, writer, reader and summary. Needs no GPU, no daemon and no privileges."""

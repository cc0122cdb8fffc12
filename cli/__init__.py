"""``phos-gpu``: one file a subcommand, listed in main.py."""

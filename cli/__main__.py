"""``python -m phos.cli``."""

from phos.cli.main import main

main(prog_name="phos-gpu")

"""``python -m phos.cli``."""

import sys

from phos.cli import restore_first
from phos.gpu_engine import standard_streams

standard_streams.occupy()
begun = restore_first.begin(sys.argv[1:])

from phos.cli.main import main  # noqa: E402  # this takes long

main(prog_name="phos-gpu", obj=begun)

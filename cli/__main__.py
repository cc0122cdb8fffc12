"""``python -m phos.cli``."""

import sys

from phos.cli import restore_first
from phos.gpu_engine import standard_streams

standard_streams.occupy()
try:
    begun = restore_first.begin(sys.argv[1:])
    from phos.cli.main import main  # this takes long
except KeyboardInterrupt:  # nothing has begun: a restore that has sees to signals itself
    sys.exit(130)

main(prog_name="phos-gpu", obj=begun)

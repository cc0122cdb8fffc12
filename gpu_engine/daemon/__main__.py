"""``phosd``: the daemon as a program.

click takes longer to load than all else that --ensure needs, for which dumps, restores and programs wait. So the few
command lines with which PhOS starts phosd are known here as they stand; what any other means is click's business.
"""

from __future__ import annotations

import sys
from pathlib import Path

from phos.gpu_engine.daemon import program


def main() -> None:
    match sys.argv[1:]:
        case []:
            program.perform()
        case ["--socket", path]:
            program.perform(Path(path))
        case ["--ensure"]:
            program.perform(ensure=True)
        case ["--ensure", "--socket", path]:
            program.perform(Path(path), ensure=True)
        case ["--stop"]:
            program.perform(stop=True)
        case _:
            from phos.gpu_engine.daemon import command_line

            command_line.main(prog_name="phosd")


if __name__ == "__main__":
    main()

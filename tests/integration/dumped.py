"""A program whose image is restored again and again, from here and there."""

from __future__ import annotations

import sys
from pathlib import Path

from tests.integration.site import Program, Site, wait_until

LAYERS = 12
LAYERS_SUM = str(LAYERS * (LAYERS + 1) // 2)
LAYERS_PROGRAM = Path(__file__).parent / "programs" / "layers.py"


class Dumped:
    """The program of programs/layers.py, dumped."""

    def __init__(self, site: Site, folder: Path) -> None:
        self.site = site
        self.go = site.folder / "go"
        self.program: Program = site.start(sys.executable, str(LAYERS_PROGRAM), "sum", str(LAYERS), str(self.go))
        self.program.wait_iterations(1)
        self.image = folder / "image"
        self.image.mkdir()
        site.dump(self.program, self.image)
        self.output = self.program.output.read_bytes()
        self.go.touch()

    def data(self) -> list[Path]:
        """Its data files that hold something."""
        return [file for file in sorted(self.image.glob("phos-data-*.raw")) if file.stat().st_size]

    def restore(self, mode: str = "eager", check: bool = True) -> str:
        """Restore it; its result, or CRIU's errors."""
        wait_until(lambda: not self.program.alive(), "the pid to be free")
        self.program.output.write_bytes(self.output)
        done = self.site.restore(self.image, check=check, PHOS_RESTORE=mode)
        if done.returncode == 0:
            return self.program.wait_result()
        return self.site.errors(self.image / "restore.log") + done.stderr

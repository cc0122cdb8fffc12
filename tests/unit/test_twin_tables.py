"""frontend/twin_table.h and its numbers in Python say the same."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

from phos.gpu_engine.ptx_instrument import twin_table as table

FRONTEND = Path(__file__).resolve().parents[2] / "frontend"

PLACES = {
    "offsetof(struct phos_twin_launch, window)": table.LAUNCH_WINDOW,
    "offsetof(struct phos_twin_launch, map)": table.LAUNCH_MAP,
    "offsetof(struct phos_twin_launch, ranges)": table.LAUNCH_RANGES,
    "offsetof(struct phos_twin_launch, kernel)": table.LAUNCH_KERNEL,
    "offsetof(struct phos_twin_launch, range)": table.LAUNCH_RANGE,
    "offsetof(struct phos_twin_launch, variable)": table.LAUNCH_VARIABLE,
    "sizeof(struct phos_twin_launch)": table.LAUNCH_BYTES,
    "sizeof(struct phos_twin_range)": 16,
    "PHOS_TWIN_RANGES": table.RANGES,
    "PHOS_TWIN_VARIABLES": table.VARIABLES,
    "offsetof(struct phos_twin_map, count)": table.MAP_COUNT,
    "offsetof(struct phos_twin_map, place)": table.MAP_PLACE,
    "sizeof(struct phos_twin_place)": table.PLACE_BYTES,
    "offsetof(struct phos_twin_place, begin)": table.PLACE_BEGIN,
    "offsetof(struct phos_twin_place, end)": table.PLACE_END,
    "offsetof(struct phos_twin_place, state)": table.PLACE_STATE,
    "offsetof(struct phos_twin_place, delta)": table.PLACE_DELTA,
    "offsetof(struct phos_twin_window, closed)": table.WINDOW_CLOSED,
    "offsetof(struct phos_twin_window, limit_ns)": table.WINDOW_LIMIT,
    "offsetof(struct phos_twin_window, mode)": table.WINDOW_MODE,
    "offsetof(struct phos_twin_window, shift)": table.WINDOW_SHIFT,
    "offsetof(struct phos_twin_window, reports)": table.WINDOW_REPORTS,
    "offsetof(struct phos_twin_window, trapped)": table.WINDOW_TRAPPED,
    "offsetof(struct phos_twin_window, report)": table.WINDOW_REPORT,
    "offsetof(struct phos_twin_window, name)": table.WINDOW_NAME,
    "sizeof(struct phos_twin_window)": table.WINDOW_BYTES,
    "sizeof(struct phos_twin_report)": table.REPORT_BYTES,
    "PHOS_TWIN_REPORTS": table.REPORTS,
    "PHOS_TWIN_NAMES": table.NAMES,
    "PHOS_TWIN_NAME": table.NAME_BYTES,
    "PHOS_TWIN_MAGIC": table.MAGIC,
    "PHOS_TWIN_COW": table.COW,
    "PHOS_TWIN_LOADING": table.LOADING,
    "PHOS_CHUNK_SAVED": table.SAVED,
}


@pytest.mark.skipif(shutil.which("gcc") is None, reason="no C compiler")
def test_the_places_are_the_same(tmp_path: Path) -> None:
    lines = "\n".join(f'printf("%llu\\n", (unsigned long long)({place}));' for place in PLACES)
    source = tmp_path / "places.c"
    source.write_text(
        '#include "twin_table.h"\n#include "window_table.h"\n#include <stddef.h>\n#include <stdio.h>\n'
        f"int main(void) {{ {lines} return 0; }}\n"
    )
    program = tmp_path / "places"
    subprocess.run(["gcc", "-std=gnu11", "-Wall", "-Werror", f"-I{FRONTEND}", "-o", program, source], check=True)
    said = subprocess.run([program], check=True, capture_output=True, text=True).stdout.split()
    assert dict(zip(PLACES, map(int, said), strict=True)) == PLACES

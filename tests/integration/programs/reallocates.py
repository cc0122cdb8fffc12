"""Fills a buffer, and when a file is there frees it and allocates a larger one, for which there is room only then.

Usage: reallocates.py GO MEGABYTES MEGABYTES

Prints READY, and then `GOT SECONDS`: how long that took. Ends with an error if there is no memory.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda_program import Buffer, Device


def main() -> None:
    go, first, second = Path(sys.argv[1]), int(sys.argv[2]) << 20, int(sys.argv[3]) << 20
    with Device():
        buffer = Buffer(first)
        buffer.fill(7)
        print("READY", flush=True)
        while not go.exists():
            time.sleep(0.01)
        begun = time.monotonic()
        buffer.close()
        buffer = Buffer(second)
        print(f"GOT {time.monotonic() - begun:.3f}", flush=True)
        buffer.fill(8)
        if buffer.download(4) != (8).to_bytes(4, "little"):
            raise SystemExit("It is not there.")


if __name__ == "__main__":
    main()

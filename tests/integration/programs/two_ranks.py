"""Starts a command twice, and fails a second after one of the two has: but notices it only once a file is there.

two_ranks.py NOTICE COMMAND...
"""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path


def main() -> int:
    notice, command = Path(sys.argv[1]), sys.argv[2:]
    ranks = [subprocess.Popen(command) for _ in range(2)]
    while True:
        codes = [rank.poll() for rank in ranks]
        if any(codes) and notice.exists():
            time.sleep(1)
            for rank in ranks:
                rank.kill()
            return 1
        if codes == [0, 0]:
            return 0
        time.sleep(0.05)


if __name__ == "__main__":
    sys.exit(main())

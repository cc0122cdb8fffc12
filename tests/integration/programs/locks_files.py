"""A program that holds locks on files: one of flock(2), one of fcntl(2), and those of SQLite's log.

locks_files.py OPTIONS (those of the examples). LOCKED: the folder of the files.
"""

from __future__ import annotations

import fcntl
import os
import sqlite3
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from cuda.bindings import driver
from cuda_program import Buffer, Device, check
from report import Report, parser


def main() -> None:
    folder = Path(os.environ["LOCKED"])
    whole, part = (os.open(folder / name, os.O_RDWR | os.O_CREAT, 0o600) for name in ("whole", "part"))
    fcntl.flock(whole, fcntl.LOCK_EX)
    fcntl.lockf(part, fcntl.LOCK_EX, 100, 50)
    database = sqlite3.connect(folder / "database")
    database.execute("pragma journal_mode=wal")
    database.execute("create table if not exists steps (number integer)")
    report = Report(parser("Locks on files.", iterations=60).parse_args())
    with Device():
        block = Buffer(1 << 20)
        report.device("")
        for iteration in range(report.options.iterations):
            check(driver.cuMemsetD32(block.address, iteration + 1, 1 << 18), "fill it")
            with database:
                database.execute("insert into steps values (?)", (iteration,))
            (steps,) = database.execute("select count(distinct number) from steps").fetchone()
            report.step(int.from_bytes(block.download(4), "little") ^ steps)
        report.result()


if __name__ == "__main__":
    main()

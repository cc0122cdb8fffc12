"""What is known of the kernels in libraries as they are delivered, without a GPU and without running any.

Every N-th kernel of each file is described as phosd would do it (docs/speculation.md). Counted are where its descriptor
came from, and those that may write anywhere: a concurrent checkpoint has them wait until all memory is saved.
"""

from __future__ import annotations

import mmap
import os
import sys
import time
from collections import Counter
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
from harness import Results

from phos.gpu_engine.spec import analysis
from phos.gpu_engine.spec.descriptor import Access, Source
from phos.gpu_engine.spec.disassembler import find_disassembler

AT_ONCE = 50
"""Kernels that a worker describes in one go."""

NAMED = 40
"""Kernels that may write anywhere, of which the results have the names."""


class Found(NamedTuple):
    """What is told of one kernel."""

    kernel: str
    source: str
    guessed: bool
    reads: bool
    writes: bool


def _image(file: str) -> memoryview:
    with open(file, "rb") as opened:
        return memoryview(mmap.mmap(opened.fileno(), 0, prot=mmap.PROT_READ))


def kernels(file: str, capability: int) -> list[str]:
    """The names of all kernels in a file."""
    return sorted(analysis.kernels(_image(file), capability))


def describe(file: str, capability: int, names: Sequence[str]) -> list[Found]:
    """What is known of some."""
    found = analysis.describe(_image(file), capability, names)
    return [
        Found(d.kernel, d.source.name, d.guessed, Access.READ in d.indirect, Access.WRITE in d.indirect)
        for d in found.values()
    ]


def summary(found: Iterable[Found]) -> dict[str, int]:
    """Counts, by source and altogether."""
    kernels = list(found)
    sources = Counter(one.source for one in kernels)
    return {
        "described": len(kernels),
        **{source.name.lower(): sources[source.name] for source in Source},
        "guessed": sum(one.guessed for one in kernels),
        "may_read_anywhere": sum(one.reads for one in kernels),
        "may_write_anywhere": sum(one.writes for one in kernels),
    }


def main() -> None:
    """Run the benchmark."""
    parser = harness.options(__doc__ or "", budget=1200.0)
    parser.add_argument("files", nargs="+", metavar="FILE", help="libraries, programs, cubins, PTX")
    parser.add_argument("--capability", type=int, default=90, metavar="C", help="the GPU's (%(default)s)")
    parser.add_argument("--every", type=int, default=12, metavar="N", help="describe each N-th kernel (%(default)s)")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), metavar="N", help="(%(default)s)")
    chosen = harness.prepare(parser)
    results = Results(chosen, "descriptors", "What is known of the kernels in libraries")
    results.note(f"Capability {chosen.capability}; disassembler: {'one' if find_disassembler() else 'none'}.")
    with ProcessPoolExecutor(chosen.jobs) as workers:
        for file in chosen.files:
            began = time.monotonic()
            every = kernels(file, chosen.capability)
            names = every[:: chosen.every]
            parts = [names[i : i + AT_ONCE] for i in range(0, len(names), AT_ONCE)]
            pending = [workers.submit(describe, file, chosen.capability, part) for part in parts]
            found: list[Found] = []
            try:
                for done in as_completed(pending, max(0.0, harness.time_left(chosen))):
                    found += done.result()
            except TimeoutError:
                for one in pending:
                    one.cancel()
                results.note(
                    f"There was no time for {len(names) - len(found)} of the kernels chosen of {Path(file).name}."
                )
            anywhere = sorted(one.kernel for one in found if one.writes)
            results.add(
                Path(file).name,
                kernels=len(every),
                **summary(found),
                seconds=time.monotonic() - began,
                writing_anywhere=anywhere[:NAMED],
            )
    results.finish()


if __name__ == "__main__":
    main()

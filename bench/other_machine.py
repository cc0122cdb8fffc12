#!/usr/bin/env python3
"""Programs that are dumped on one machine and restored on another: what they compute there, and whose GPU that is.

    bench/other_machine.py --archive DIR dump       # on the one
    bench/other_machine.py --archive DIR restore    # on the other, to which DIR was brought

Both have to have PhOS, the programs and --work at the same paths. DIR holds a compressed archive in parts, the images
and what the programs had written. CRIU is told to restore as ever: nothing here helps it.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import harness
import process
from harness import Results
from process import Program

PROGRAMS = ("mlp", "pointer_chase", "stencil")
FIRST_PID = 20000
"""Higher than what a machine that was just started has given out: CRIU restores processes under the pids they had."""

ITERATION_S = 0.1
PART = "15M"
WAYS = ("eager", "lazy")


def machine() -> dict[str, str]:
    """Return what tells one machine from another."""
    gpus = process.status()["gpus"]
    return {
        "boot": Path("/proc/sys/kernel/random/boot_id").read_text().strip(),
        "gpu": ", ".join(gpu["uuid"] for gpu in gpus),
    }


def program(chosen: argparse.Namespace, name: str) -> Program:
    """Return one of the programs, as it is started and as it is restored."""
    words = ("--iteration-seconds", str(ITERATION_S))
    command = process.python_program(process.EXAMPLES / f"{name}.py", *words)
    return Program(command, chosen.work, chosen.device, name=name)


def dump(chosen: argparse.Namespace) -> None:
    """Start, dump and pack them; what there is to know of them comes along."""
    said: dict[str, object] = {"machine": machine()}
    for number, name in enumerate(chosen.programs):
        Path("/proc/sys/kernel/ns_last_pid").write_text(str(FIRST_PID + 1000 * number))
        one = program(chosen, name).start()
        try:
            one.wait_for("^ITERATION 5 ")
            image = chosen.work / f"{name}-image"
            image.mkdir()
            process.criu_dump(one, image)
        finally:
            one.kill()
        said[name] = {"pid": one.pid, "errors": one.errors_size, "iterations": one.iterations()}
        print(f"{name}: {process.folder_size(image) / 1e6:.0f} MB", flush=True)
    (chosen.work / "said.json").write_text(json.dumps(said))
    chosen.archive.mkdir(parents=True, exist_ok=True)
    pack = f"tar -cSf - . | xz -T0 -6 | split -b {PART} - {chosen.archive}/part."
    subprocess.run(["bash", "-o", "pipefail", "-c", pack], cwd=chosen.work, check=True)
    print(f"{sum(part.stat().st_size for part in chosen.archive.iterdir()) / 1e6:.1f} MB in {chosen.archive}")


def restore(chosen: argparse.Namespace) -> None:
    """Unpack and restore them, and compare what they say until their end with what they say when left alone."""
    subprocess.run(
        ["bash", "-o", "pipefail", "-c", f"cat {chosen.archive}/part.* | tar -xJf -"], cwd=chosen.work, check=True
    )
    said, here = json.loads((chosen.work / "said.json").read_text()), machine()
    results = Results(chosen, "other-machine", "Programs that were dumped on another machine")
    for name in (name for name in PROGRAMS if name in said):
        for way in WAYS:
            one, image = program(chosen, name), chosen.work / f"{name}-image"
            one.pid, one.errors_size = said[name]["pid"], said[name]["errors"]
            kept = one.report.read_text()
            words = [process.PHOS_GPU, "restore", *(["--lazy"] if way == "lazy" else []), str(image)]
            try:
                one.before_restore()
                seconds, _ = process.command(words, 120)
                lines = one.finish()
                wanted = (process.EXAMPLES / "reference" / f"{name}.txt").read_text().splitlines()
                results.add(
                    f"{name}, {way}",
                    another_machine="yes" if here["boot"] != said["machine"]["boot"] else "no",
                    another_gpu="yes" if here["gpu"] != said["machine"]["gpu"] else "no",
                    iterations_before=said[name]["iterations"],
                    restored_s=seconds,
                    as_if_left_alone="yes" if list(dict.fromkeys(lines)) == wanted else "no",
                )
            finally:
                one.kill()
                one.report.write_text(kept)
    results.finish()


def main() -> None:
    """Run as a program."""
    parser = harness.options(__doc__ or "", budget=200)
    parser.add_argument("step", choices=("dump", "restore"))
    parser.add_argument(
        "--programs", type=harness.words, default=PROGRAMS, metavar="NAMES", help=f"of {', '.join(PROGRAMS)} (all)"
    )
    parser.add_argument("--archive", type=Path, required=True, metavar="DIR", help="where the archive is, or comes to")
    chosen = harness.prepare(parser)
    harness.refuse_unknown(parser, chosen.programs, PROGRAMS)
    process.command(["phosd", "--ensure"], 60)
    (dump if chosen.step == "dump" else restore)(chosen)


if __name__ == "__main__":
    main()

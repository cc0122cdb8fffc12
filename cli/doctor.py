"""`phos-gpu doctor`: what this machine offers and lacks, and what to do about it."""

from __future__ import annotations

import json
import os
import socket
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import asdict

import click

from phos.cli import probes
from phos.cli.parameters import json_option
from phos.cli.probes import Finding

GROUPS: tuple[tuple[str, Callable[[], Iterator[Finding]]], ...] = (
    ("kernel", probes.kernel),
    ("CRIU", probes.criu),
    ("GPU", probes.gpu),
    ("permissions", probes.permissions),
    ("limits", probes.limits),
    ("PhOS", probes.installation),
)
STYLE = {"ok": "green", "warning": "yellow", "missing": "bold red"}


def examine() -> list[Finding]:
    """Run every probe. A probe that fails itself is a finding, not the end of the others."""
    findings: list[Finding] = []
    for group, probe in GROUPS:
        try:
            findings += probe()
        except Exception as error:
            text = f"could not be examined: {type(error).__name__}: {error}"
            findings.append(Finding(group, "warning", text, "please report this"))
    return findings


def show_table(findings: list[Finding]) -> None:
    """For terminals."""
    from rich.table import Table
    from rich.text import Text

    from phos.cli.console import Console

    table = Table(box=None, pad_edge=False)
    for heading in ("", "what", "found", "what to do"):
        table.add_column(heading, overflow="fold")
    for finding in findings:
        state = Text(finding.state, style=STYLE[finding.state])
        table.add_row(state, Text(finding.name), Text(finding.found), Text(finding.remedy))
    Console().print(table)


def show_lines(findings: list[Finding]) -> None:
    """For logs and pipes: a line a finding."""
    for finding in findings:
        remedy = f"; {finding.remedy}" if finding.remedy else ""
        click.echo(f"{finding.state:8}{finding.name}: {finding.found}{remedy}")


def conclusion(findings: list[Finding]) -> str:
    """The last line."""
    count = Counter(finding.state for finding in findings)
    if count["missing"]:
        names = ", ".join(finding.name for finding in findings if finding.state == "missing")
        return f"{socket.gethostname()} lacks {names}: see above what to do."
    if count["warning"]:
        better = "one thing" if count["warning"] == 1 else f"{count['warning']} things"
        return f"Everything needed is there; {better} could be better."
    return "Everything is there."


@click.command("doctor")
@json_option()
def doctor(as_json: bool) -> None:
    """Say what this machine offers and lacks, and what to do about it.

    Exit status: 0 if PhOS can work here (with a GPU, or without one on the software GPU), 1 if something it needs is
    missing.
    """
    findings = examine()
    bad = any(finding.state == "missing" for finding in findings)
    if as_json:
        click.echo(json.dumps({"ok": not bad, "user": os.geteuid(), "findings": [asdict(f) for f in findings]}))
    else:
        (show_table if sys.stdout.isatty() else show_lines)(findings)
        click.echo(conclusion(findings))
    sys.exit(1 if bad else 0)

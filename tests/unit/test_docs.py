"""The documentation against the code: links, commands, options, variables, statuses and messages are all there."""

from __future__ import annotations

import ast
import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import click
import pytest

from phos.cli.main import COMMANDS
from phos.gpu_engine.errors import ExitStatus
from phos.images import formats

ROOT = Path(__file__).resolve().parents[2]
DOCS = ROOT / "docs"
PAGES = sorted(DOCS.glob("*.md"))
CODE = ("cli", "gpu_engine", "images", "frontend", "criu_plugin", "softgpu", "packaging", "bench", "tests", ".ci")

LINK = re.compile(r"(?<!!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"^```.*?^```", re.M | re.S)


def text_of(name: str) -> str:
    return (DOCS / name).read_text()


def section(text: str, heading: str) -> str:
    """What stands under a heading, up to the next of the same level or above."""
    level = heading.split(" ", maxsplit=1)[0]
    found = re.search(rf"^{re.escape(heading)}\n(.*?)(?=^#{{1,{len(level)}}} |\Z)", text, re.M | re.S)
    assert found, f"there is no section '{heading}'"
    return found[1]


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives a page's headings."""
    headings = re.findall(r"^#{1,6} (.+)$", FENCE.sub("", page.read_text()), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.strip().lower()).replace(" ", "-") for heading in headings}


def links(page: Path) -> list[str]:
    return LINK.findall(FENCE.sub("", page.read_text()))


def sources(*suffixes: str) -> Iterator[tuple[Path, str]]:
    """Our sources of some kinds; '' stands for scripts without a suffix."""
    files = [path for folder in CODE for path in sorted((ROOT / folder).rglob("*")) if path.suffix in suffixes]
    if "" in suffixes:
        files.append(ROOT / "install.sh")
    for path in files:
        if path.is_file() and path != Path(__file__).resolve():
            yield path, path.read_text(errors="replace")


# Pages and links.


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "README.md", ROOT / "examples" / "README.md"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_links_resolve(page: Path) -> None:
    broken = []
    for link in links(page):
        if link.startswith(("http:", "https:", "mailto:")):
            continue
        target, _, anchor = link.partition("#")
        path = (page.parent / target).resolve() if target else page
        if not path.exists():
            broken.append(f"{link}: there is no such file")
        elif anchor and path.suffix == ".md" and anchor not in anchors(path):
            broken.append(f"{link}: {path.name} has no such heading")
    assert not broken


def test_every_page_is_reachable_from_the_index() -> None:
    seen: set[Path] = set()
    todo = [DOCS / "index.md"]
    while todo:
        page = todo.pop()
        if page in seen or not page.exists():
            continue
        seen.add(page)
        targets = [(page.parent / link.partition("#")[0]).resolve() for link in links(page) if ":" not in link]
        todo += [path for path in targets if path.suffix == ".md" and path.parent == DOCS]
    assert not [page.name for page in PAGES if page not in seen]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_no_machine_of_ours_shows(page: Path) -> None:
    """Neither paths of the machine a page was written on, nor the hosts its packages came from."""
    text = page.read_text()
    paths = re.findall(r"(?<![\w.>/])/(?:work|home|root|Users|mnt|srv)/\S*|(?<![\w.])/tmp/(?!phos-)\S*", text)
    hosts = re.findall(r"https?://(?!criu\.org|docs\.nvidia\.com|github\.com)[^\s)>]*", text)
    registries = re.findall(r"\S*(?:py[p]i\.|python[h]osted|artifactory|\bnexus\b|localhost:\d)\S*", text, re.I)
    assert not paths + hosts + registries


# Commands.


def options_of(command: click.Command) -> list[str]:
    return [max(option.opts, key=len) for option in command.params if isinstance(option, click.Option)]


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_and_option_is_described(name: str) -> None:
    command = getattr(importlib.import_module(f"phos.cli.{name}"), name)
    described = section(text_of("cli.md"), f"### phos-gpu {name}")
    assert not [option for option in options_of(command) if option not in described]


def test_no_command_is_described_that_does_not_exist() -> None:
    assert set(re.findall(r"^### phos-gpu (\S+)$", text_of("cli.md"), re.M)) == set(COMMANDS)


def test_phosd_is_described() -> None:
    from phos.gpu_engine.daemon.command_line import main

    described = section(text_of("cli.md"), "## phosd")
    assert not [option for option in options_of(main) if option not in described]


def test_every_exit_status_is_listed() -> None:
    table = section(text_of("cli.md"), "## Exit statuses")
    rows = {(int(number), name) for number, name in re.findall(r"^\| (\d+) \| `(\w+)` \|", table, re.M)}
    assert rows == {(status.value, status.name) for status in ExitStatus}


def test_the_fields_of_status_are_listed() -> None:
    from phos.gen import wire_pb2

    described = section(text_of("cli.md"), "### phos-gpu status")
    message = wire_pb2.Status.DESCRIPTOR
    names = {field.name for field in message.fields}
    names |= {field.name for nested in message.nested_types for field in nested.fields}
    missing = [name for name in names if not re.search(rf"`{name}(\[\])?`", described)]
    assert not missing


# Environment variables.

VARIABLE = {
    ".c": re.compile(r'\b(?:getenv|flag|number)\("((?:PHOS|SOFTGPU)_\w+)"'),
    ".py": re.compile(r'(?:\w\(|environ\w*\[)\s*"((?:PHOS|SOFTGPU)_\w+)"'),
    "": re.compile(r"\$\{?((?:PHOS)_\w+)"),
    ".sh": re.compile(r"\$\{?((?:PHOS)_\w+)"),
}


def variables(prefix: str) -> set[str]:
    found = set()
    for suffix, pattern in VARIABLE.items():
        for _, text in sources(suffix):
            found |= {name for name in pattern.findall(text) if name.startswith(prefix)}
    return found - {known.name for known in formats.FORMATS}  # magics, which look alike


def test_every_variable_of_phos_is_described() -> None:
    rows = set(re.findall(r"^\| `(PHOS_\w+)` \|", section(text_of("cli.md"), "## Environment variables"), re.M))
    used = variables("PHOS_")
    assert {"PHOS_SOCKET", "PHOS_LOG", "PHOS_QUIESCE_SECONDS", "PHOS_CRIU", "PHOS_CARRY_HOST"} <= used
    assert not used - rows


def test_no_variable_is_described_that_nothing_reads() -> None:
    rows = set(re.findall(r"^\| `(PHOS_\w+)` \|", section(text_of("cli.md"), "## Environment variables"), re.M))
    everything = "\n".join(text for _, text in sources(".c", ".py", "", ".sh"))
    assert not [name for name in rows if name not in everything]


def test_every_variable_of_the_software_gpu_is_described() -> None:
    read = "\n".join(text for path, text in sources(".c") if path.parent.name == "softgpu")
    used = set(re.findall(r'"(SOFTGPU_\w+)"', read))
    assert len(used) > 5
    described = section(text_of("software-gpu.md"), "## Settings")
    assert not [name for name in used if f"`{name}`" not in described]


# Messages: what troubleshooting.md explains must still be said somewhere.

HOLE = "…"


def python_messages(text: str) -> Iterator[str]:
    """The string literals of a module, neighbours joined, with a hole for each value put in."""
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value
        elif isinstance(node, ast.JoinedStr):
            parts = [part.value if isinstance(part, ast.Constant) else HOLE for part in node.values]
            yield "".join(str(part) for part in parts)


def c_messages(text: str) -> Iterator[str]:
    for literal in re.findall(r'"(?:[^"\\\n]|\\.)*"(?:\s*"(?:[^"\\\n]|\\.)*")*', text):
        joined = re.sub(r'"\s*"', "", literal)[1:-1]
        yield re.sub(r"%[-\d.]*(?:ll|z|j|l)?[a-zA-Z]", HOLE, joined)


def all_messages() -> list[str]:
    found: list[str] = []
    for path, text in sources(".py", ".c", ""):
        if path.is_relative_to(ROOT / "tests") or path.is_relative_to(ROOT / "bench"):
            continue
        if path.suffix == ".py":
            found += python_messages(text)
        elif path.suffix == ".c":
            found += c_messages(text)
        else:
            found.append(re.sub(r"\$\{[^}]*\}|\$\w+", HOLE, text))
    found.append(re.sub(r"\$\{[^}]*\}|\$\w+", HOLE, (ROOT / "packaging" / "layout.sh").read_text()))
    return found


def symptoms() -> list[str]:
    """The messages in the first column of our own tables; CRIU's are not ours to check."""
    ours = text_of("troubleshooting.md").partition("\n## Starting\n")[2].partition("\n## From CRIU\n")[0]
    return re.findall(r"^\| `([^`]+)` \|", ours, re.M)


@pytest.fixture(scope="module")
def messages() -> list[str]:
    return all_messages()


def test_there_are_symptoms() -> None:
    assert len(symptoms()) > 50


@pytest.mark.parametrize("symptom", symptoms())
def test_every_symptom_is_a_message_of_ours(symptom: str, messages: list[str]) -> None:
    pieces = [piece.strip() for piece in symptom.split(HOLE) if len(piece.strip()) > 3]
    assert pieces
    assert any(all(piece in message for piece in pieces) for message in messages)

"""The stop protocol's promises: what was dumped comes back, anywhere in its run, as often as one likes."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import sys
import sysconfig
from pathlib import Path

import pytest

from tests.integration.site import PATIENCE, Program, Site, example_words, wait_until, words

PROGRAMS = Path(__file__).parent / "programs"
EXAMPLES = {
    "mlp": ("--iterations", "400", "--iteration-seconds", "0.04"),
    "pointer_chase": ("--iterations", "400", "--iteration-seconds", "0.04"),
    "struct_argument": ("--iterations", "400", "--iteration-seconds", "0.04"),
    "device_pointer": ("--iterations", "400", "--iteration-seconds", "0.04"),
    "stencil": ("--iterations", "400", "--iteration-seconds", "0.04"),
}


def uninterrupted(site: Site, name: str, *options: str) -> str:
    """The result of a run that nothing disturbs, without PhOS in the process; at full speed."""
    return site.reference(name, *options[:2])


def dumped(site: Site, name: str) -> tuple[str, Program, Path]:
    """The result that an example should have, the example, and the image that it was dumped into half way."""
    expected = uninterrupted(site, name, *EXAMPLES[name])
    program = site.example(name, *EXAMPLES[name])
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image)
    return expected, program, image


@pytest.mark.parametrize("name", EXAMPLES)
def test_dump_kill_and_restore_gives_the_uninterrupted_result(site: Site, name: str) -> None:
    expected, program, image = dumped(site, name)
    assert not program.alive()
    assert program.result() is None
    site.run("phos-gpu", "verify", str(image))
    site.restore(image)
    assert program.wait_result() == expected


def test_leave_running_disturbs_nothing_and_the_image_is_whole(site: Site) -> None:
    options = EXAMPLES["mlp"]
    expected = uninterrupted(site, "mlp", *options)
    program = site.example("mlp", *options)
    program.wait_iterations(4)
    image = site.image()
    # CRIU restores a file only at the size it had: keep the output as it was while the program stood still.
    script = site.folder / "post-dump"
    script.write_text(f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != post-dump ] || cp {program.output} {image}/output\n')
    script.chmod(0o755)
    site.dump(program, image, "--leave-running", "--action-script", str(script))
    assert program.wait_result() == expected
    site.run("phos-gpu", "verify", str(image))
    program.process.wait()
    # The image holds the earlier moment: restored, it computes the rest again, to the same end.
    program.output.write_bytes((image / "output").read_bytes())
    assert program.result() is None
    site.restore(image)
    assert program.wait_result() == expected


def test_restore_twice_from_one_image(site: Site) -> None:
    expected, program, image = dumped(site, "stencil")
    at_dump = program.output.read_bytes()
    for _ in range(2):
        program.output.write_bytes(at_dump)
        site.restore(image)
        assert program.wait_result() == expected


def test_ten_generations(site: Site) -> None:
    options = ("--iterations", "300")
    expected = uninterrupted(site, "device_pointer", *options)
    program = site.example("device_pointer", *options, "--iteration-seconds", "0.05")
    for generation in range(10):
        program.wait_progress(2)
        assert program.result() is None, f"the program ended before generation {generation}"
        image = site.image(f"generation-{generation}")
        site.dump(program, image)
        site.restore(image)
    assert program.wait_result() == expected


def test_restore_into_a_fresh_daemon(site: Site) -> None:
    expected, program, image = dumped(site, "stencil")
    first = site.daemon_pid()
    site.stop_phosd()
    site.restore(image)
    assert site.daemon_pid() != first
    assert program.wait_result() == expected


def test_lazy_pages_restore(site: Site) -> None:
    expected, program, image = dumped(site, "stencil")
    server = site.background("criu", "lazy-pages", "-D", str(image), "-o", "lazy.log")
    try:
        wait_until((image / "lazy-pages.socket").exists, "the lazy-pages server")
        site.restore(image, "--lazy-pages")
        assert program.wait_result() == expected
    finally:
        server.kill()
        server.wait()


def test_tree_of_cuda_processes(site: Site, tmp_path: Path) -> None:
    """A parent and two children, each with its own context; all are in one image."""
    script = tmp_path / "family.sh"
    options = "--iterations 400 --iteration-seconds 0.05 --until $1"
    script.write_text(
        f"{shlex.join(example_words('stencil'))} {options} >a.log 2>&1 &\n"
        f"{shlex.join(example_words('struct_argument'))} {options} >b.log 2>&1 &\n"
        "wait\necho RESULT family\n"
    )
    expected = {name: uninterrupted(site, name, "--iterations", "400") for name in ("stencil", "struct_argument")}
    program = site.until_awaited("/bin/sh", str(script))
    logs = {"stencil": site.folder / "a.log", "struct_argument": site.folder / "b.log"}
    wait_until(
        lambda: all(log.exists() and log.read_text().count("ITERATION") >= 5 for log in logs.values()), "both children"
    )
    image = site.image()
    site.dump(program, image)
    summary = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert len(summary["processes"]) == 2
    site.restore(image)
    assert program.wait_result() == "family"
    for name, log in logs.items():
        assert f"RESULT {expected[name]}" in log.read_text()


def test_process_without_the_frontend_is_saved_by_the_driver_with_a_warning(site: Site) -> None:
    options = ("--iterations", "400", "--iteration-seconds", "0.04")  # phosd has to be started first
    expected = uninterrupted(site, "stencil", *options)
    program = site.example("stencil", *options, under=False)
    program.wait_iterations(5)
    image = site.image()
    site.dump(program, image)
    assert "was not started under 'phos-gpu run'" in (image / "dump.log").read_text()
    site.restore(image)
    assert program.wait_result() == expected


@pytest.mark.parametrize("under", [True, False])
def test_names_that_are_not_utf8(site: Site, under: bool) -> None:
    """Of the program, of an argument, of the image's folder: they enter messages, and messages are UTF-8."""
    options = ("--iterations", "400", "--iteration-seconds", "0.04")  # phosd may have to be started first
    expected = uninterrupted(site, "stencil", *options)
    folder = site.folder / os.fsdecode(b"caf\xe9")
    program = folder / "bin" / os.fsdecode(b"pyth\xf6n")
    program.parent.mkdir(parents=True)
    shutil.copy(os.path.realpath(sys.executable), program)
    # A copy finds its library beside it: this virtual environment's.
    (folder / "lib").symlink_to(Path(sys.prefix) / "lib")
    shutil.copy(Path(sys.prefix) / "pyvenv.cfg", folder)
    words = example_words("stencil")[1:]
    # Since Python 3.12, extension modules whose path is not UTF-8 cannot be imported: the same ones by another path.
    packages = sysconfig.get_path("platlib")
    command = (str(program), "-X", os.fsdecode(b"n\xf6ne"), *words, *options, "--until")
    started = site.until_awaited(*command, under=under, PYTHONPATH=packages)
    started.wait_iterations(3)
    assert os.readlink(f"/proc/{started.pid}/exe") == str(program)
    image = folder / os.fsdecode(b"im\xe4ge")
    image.mkdir()
    site.dump(started, image)
    shown = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
    assert shown["processes"][0]["executable"].endswith("/caf?/bin/pyth?n")
    assert "n?ne" in shown["processes"][0]["command_line"]
    assert site.status()["jobs"][0]["image"].endswith("/caf?/im?ge")
    site.restore(image)
    assert started.wait_result() == expected


def test_a_stream_that_waits_for_the_programs_next_call_is_not_waited_for_long(site: Site) -> None:
    """Its gate is opened again soon, so that it can make that call; the checkpoint is made then."""
    program = site.start(sys.executable, str(PROGRAMS / "waits_for_itself.py"))
    wait_until(lambda: "WAITING" in program.lines(), "a stream that waits")
    image = site.image()
    site.dump(program, image, "--leave-running")
    program.wait_iterations(1)
    (through,) = (line for line in program.lines() if line.startswith("THROUGH"))
    assert float(through.split()[1]) < 10, "the program stood still"
    site.run("phos-gpu", "verify", str(image))


@pytest.mark.parametrize("rest", ["0", "0.2"])
@pytest.mark.parametrize("protocol", ["stop", "cow"])
def test_processes_whose_streams_wait_for_each_other_are_checkpointed(site: Site, protocol: str, rest: str) -> None:
    """However far ahead one is of the other when their gates are closed, and if one nearly always waits."""
    program = site.start(sys.executable, str(PROGRAMS / "ranks.py"), str(site.folder), RANKS_REST=rest)

    def go_on(count: int = 2) -> None:
        wanted = {rank: reached(rank) + count for rank in (0, 1)}
        wait_until(lambda: all(reached(rank) >= wanted[rank] for rank in (0, 1)), "both to go on")

    def reached(rank: int) -> int:
        assert not any(line.startswith("ERROR") for line in program.lines()), program.lines()[-5:]
        return sum(line.startswith(f"RANK {rank} ") for line in program.lines())

    quiescing = []
    for number in range(4):
        go_on()
        image = site.image(str(number))
        words = "phos-gpu", "checkpoint", "--leave-running", "--protocol", protocol, str(program.pid), str(image)
        site.run(*words)
        said = json.loads(site.run("phos-gpu", "inspect", "--json", str(image)).stdout)
        assert said["protocol"] == protocol
        quiescing += [phase["seconds"] for phase in said["timings"]["phases"] if phase["phase"] == "quiesce"]
    assert len(quiescing) == 4
    assert max(quiescing) < 10, quiescing
    go_on()
    last = site.image("last")
    site.dump(program, last)
    site.restore(last)
    go_on()


def test_a_process_that_ends_while_others_are_quiesced_ends_the_checkpoint(site: Site) -> None:
    """No try would be better than the last, and each stops the others."""
    site.run("phosd", "--ensure")
    hold = site.folder / "copies-held"  # no rank comes to rest as long as it is there
    program = site.start(sys.executable, str(PROGRAMS / "ranks.py"), str(site.folder), SOFTGPU_COPY_HOLD=str(hold))
    wait_until(lambda: all(f"RANK {rank} ITERATION 2" in program.lines() for rank in (0, 1)), "both")
    hold.touch()
    image = site.image()
    dump = site.begin_dump(program, image, "--leave-running")
    wait_until(lambda: len(site.status()["jobs"]) == 1, "the dump to begin")
    (killed,) = (process for process in site.processes() if words(process)[-2:] == [str(site.folder), "1"])
    killed.kill()
    assert dump.wait(PATIENCE) != 0
    assert f"Process {killed.pid} " in (said := site.errors(image / "dump.log"))
    assert "ended while it was being checkpointed" in said


@pytest.mark.parametrize("what", ["dump", "restore"])
def test_the_image_directory_is_called_otherwise_before_criu_ends(site: Site, what: str) -> None:
    """CRIU and phosd have it open, and so has who waits for both; another of that name is nobody's business."""
    expected = site.reference("mlp", *EXAMPLES["mlp"][:2])
    program = site.example("mlp", *EXAMPLES["mlp"])
    program.wait_iterations(5)
    image, now = site.image(), site.folder / "now"
    moment = "post-dump" if what == "dump" else "pre-resume"
    script = site.folder / "renames"
    script.write_text(
        f'#!/bin/sh\n[ "$CRTOOLS_SCRIPT_ACTION" != {moment} ] || {{ mv {image} {now}; mkdir {image}; }}\n'
    )
    script.chmod(0o755)
    scripted = ("--action-script", str(script))
    if what == "dump":
        site.dump(program, image, "--leave-running", *scripted)
        program.process.kill()
        site.gone(program)
        site.restore(now)
    else:
        site.dump(program, image)
        site.restore(image, *scripted)
    assert list(image.iterdir()) == []
    assert program.wait_result() == expected

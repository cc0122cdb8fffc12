"""``phos-gpu audit``: what it says of programs whose effect on memory is known."""

from __future__ import annotations

import json
import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.installation import examples_folder, launcher
from phos.gpu_engine.spec.cache import Cache
from phos.gpu_engine.spec.descriptor import Access, AccessDescriptor
from tests.integration.site import Site, example_words, wait_until
from tests.unit.library_fakes import Workshop

pytestmark = [pytest.mark.root, pytest.mark.timeout(180)]

PROGRAM = Path(__file__).parent / "programs" / "audited.py"
KIB64 = 65536


@pytest.fixture(autouse=True)
def private_cache(site: Site) -> None:
    site.environment["PHOS_CACHE"] = str(site.folder / "cache")


def audit(site: Site, *command: str, status: int = 0, options: tuple[str, ...] = (), **changes: str) -> dict[str, Any]:
    """An audit's report."""
    output = site.folder / "audit.json"
    words = ["phos-gpu", "audit", "--output", str(output), *options, "--", sys.executable, *command]
    done = site.run(*words, check=False, **changes)
    assert done.returncode == status, f"{done.returncode}\n{done.stdout}\n{done.stderr}"
    report: dict[str, Any] = json.loads(output.read_text())
    report["printed"] = done.stdout
    return report


def kernel(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The one row of a kernel."""
    (row,) = [row for row in report["kernels"] if row["kernel"] == name]
    return dict(row)


def source(report: dict[str, Any], name: str) -> dict[str, Any]:
    """The row of a source."""
    (row,) = [row for row in report["sources"] if row["source"] == name]
    return dict(row)


@pytest.mark.parametrize("name", ["mlp", "pointer_chase", "struct_argument", "device_pointer", "stencil"])
def test_examples_are_predicted_right(site: Site, name: str) -> None:
    alone = site.example(name, "--iterations", "3", under=False)
    report = audit(site, *example_words(name)[1:], "--iterations", "3")
    assert {row["source"] for row in report["sources"]} <= {"ptx", "call"}
    assert all(row["wrong_chunks"] == 0 and row["success"] == 1 for row in report["sources"])
    assert source(report, "ptx")["written_chunks"] > 0
    assert all(not row["skipped"] for row in report["kernels"])
    assert f"RESULT {alone.wait_result()}" in report["printed"]


def test_rodinia_like_programs_are_predicted_right(site: Site) -> None:
    """Every kernel of every program, whatever way its addresses take.

    Where they lie in a tree in memory, anything may be written; those in an array there are known at the launch.
    """
    rodinia = examples_folder().parent / "bench" / "programs" / "audited_rodinia.py"
    report = audit(site, str(rodinia), options=("--limit-launches", "3", "--every", "0"))
    print(report["printed"])
    assert "RESULT right" in report["printed"]
    ptx = source(report, "ptx")
    assert (ptx["kernels"], ptx["kernels_wrong"], ptx["wrong_launches"]) == (21, 0, 0)
    assert ptx["audited"] == sum(min(3, row["launches"]) for row in report["kernels"] if row["source"] == "ptx")
    assert source(report, "call")["wrong_launches"] == 0
    anywhere = {row["kernel"] for row in report["kernels"] if row["anything"]}
    assert len(anywhere) == 1
    assert "find" in anywhere.pop()
    (batched,) = (row for row in report["kernels"] if "subtract" in row["kernel"])
    assert batched["written_chunks"] > 0
    assert batched["predicted_bytes"] > 0
    assert "Success by source" in report["printed"]


def test_patience_with_the_analysis_ends(site: Site) -> None:
    """A second is enough for these; how long they took is in the report."""
    report = audit(site, str(PROGRAM), "kernels", options=("--patience", "60"))
    assert kernel(report, "put")["source"] == "ptx"
    assert 0 < report["analysis_seconds"] < 60


def test_written_and_predicted_chunks_are_counted(site: Site) -> None:
    report = audit(site, str(PROGRAM), "kernels")
    put = kernel(report, "put")
    assert (put["source"], put["launches"], put["audited"]) == ("ptx", 3, 3)
    assert (put["written_chunks"], put["predicted_chunks"]) == (1 + 3 + 0, 3 * 64)
    assert put["over_traced_bytes"] == put["predicted_bytes"] - 4 * KIB64
    copy = kernel(report, "copy")
    assert (copy["written_chunks"], copy["predicted_chunks"], copy["wrong_chunks"]) == (1, 64, 0)
    reads = kernel(report, "only_reads")
    assert (reads["written_chunks"], reads["predicted_chunks"]) == (0, 64)
    anywhere = kernel(report, "through_variable")
    assert (anywhere["anything"], anywhere["written_chunks"], anywhere["wrong_chunks"]) == (1, 1, 0)
    assert kernel(report, "cuMemsetD32_v2")["written_chunks"] == 64
    upload = kernel(report, "cuMemcpyHtoD_v2")
    assert (upload["written_chunks"], upload["predicted_bytes"]) == (1, 256)  # the variable is the driver's
    assert report["chunk_bytes"] == KIB64


def inject(site: Site, name: str) -> None:
    """Make the cached descriptor of a kernel say that it only reads."""
    cache = Cache(site.folder / "cache")
    changed = 0
    assert cache.folder is not None
    for path in cache.folder.glob("*.json"):
        key = path.stem.removeprefix("phos-")
        found = cache.load(key).kernels
        if name not in found:
            continue
        old = found[name]
        fields = tuple(type(f)(f.offset, f.size, Access.READ, f.kind) for f in old.fields)
        found[name] = AccessDescriptor(old.kernel, old.parameters, fields, Access.NONE, old.source)
        cache.store(key, found.values())
        changed += 1
    assert changed == 1


def test_a_wrong_descriptor_is_named(site: Site) -> None:
    audit(site, str(PROGRAM), "kernels")
    site.stop_phosd()
    inject(site, "copy")
    report = audit(site, str(PROGRAM), "kernels", status=7)
    assert [row["kernel"] for row in report["kernels"] if row["wrong_launches"]] == ["copy"]
    assert (source(report, "ptx")["kernels_wrong"], source(report, "ptx")["wrong_launches"]) == (1, 1)
    assert source(report, "call")["success"] == 1
    (wrong,) = kernel(report, "copy")["wrong"]
    (place,) = wrong["written"]
    to, from_, count = wrong["parameters"]
    assert place["address"] == place["allocation"] == to != from_
    assert (place["size"], place["allocation_size"]) == (KIB64, 4 << 20)
    assert int(count, 16) == KIB64 // 4
    assert place["entry_point"].startswith("cuMemAlloc")
    assert f"Wrong guess (ptx): copy, launch 1 of process {wrong['pid']}" in report["printed"]
    assert place["address"] in report["printed"]


def test_a_graph_is_one_kernel(site: Site) -> None:
    report = audit(site, str(PROGRAM), "graph")
    graph = kernel(report, "graph of 3 nodes: copy, put")
    assert (graph["source"], graph["launches"], graph["wrong_chunks"]) == ("graph", 2, 0)
    assert graph["written_chunks"] == 2 + 1 + 2  # `second` has what it had, the second time
    assert graph["predicted_chunks"] == 2 * (16 + 16)
    site.stop_phosd()
    inject(site, "put")
    report = audit(site, str(PROGRAM), "graph", status=7)
    wrong = kernel(report, "graph of 3 nodes: copy, put")
    assert (wrong["wrong_launches"], wrong["wrong_chunks"]) == (2, 2)
    assert kernel(report, "put")["wrong_launches"] == 0  # it wrote what was there


def test_threads_take_turns(site: Site) -> None:
    report = audit(site, str(PROGRAM), "threads", options=("--limit-launches", "1000"))
    put = kernel(report, "put")
    assert (put["launches"], put["audited"], put["written_chunks"], put["wrong_chunks"]) == (80, 80, 80, 0)
    assert not put["skipped"]


def test_launches_are_sampled(site: Site) -> None:
    report = audit(site, str(PROGRAM), "threads", options=("--limit-launches", "5", "--every", "10"))
    assert (kernel(report, "put")["launches"], kernel(report, "put")["audited"]) == (80, 5 + 7)
    report = audit(site, str(PROGRAM), "threads", options=("--limit-launches", "5", "--every", "0"))
    assert kernel(report, "put")["audited"] == 5


def test_a_library_call_says_what_is_written(site: Site) -> None:
    blas = Workshop(site.folder).cublas(13)
    report = audit(site, str(PROGRAM), "library", str(blas))
    (inside, before) = sorted((r for r in report["kernels"] if r["kernel"] == "copy"), key=lambda r: str(r["source"]))
    assert (inside["source"], inside["library"]) == ("library", "cublasSgemm_v2")
    assert (inside["predicted_bytes"], inside["written_chunks"], inside["wrong_chunks"]) == (16 * 8 * 4, 1, 0)
    assert (before["source"], before["predicted_bytes"]) == ("ptx", 1 << 20)


def test_work_that_waits_for_later_work_is_left_alone(site: Site) -> None:
    report = audit(site, str(PROGRAM), "hanging")
    assert "RESULT done" in report["printed"]
    put = kernel(report, "put")
    assert put["launches"] == 3
    assert (put["audited"], put["skipped"]) == (2, {"other work could not be waited for": 1})
    assert "put: 1 launches not compared: other work" in report["printed"]


def test_an_audited_process_is_not_checkpointed(site: Site) -> None:
    site.run("phosd", "--ensure")
    program = site.until_awaited(
        str(launcher("phos-gpu")), "audit", "--", sys.executable, str(examples_folder() / "stencil.py"),
        "--iterations", "40", "--iteration-seconds", "0.2", "--until", under=False,
    )  # fmt: skip
    wait_until(lambda: program.iterations() > 1, "the program to compute")
    (audited,) = site.status()["processes"]
    done = site.run("phos-gpu", "checkpoint", str(audited["pid"]), str(site.image()), check=False)
    assert done.returncode != 0
    assert "phos-gpu audit runs it" in done.stderr
    program.wait_progress(2)


def test_status_of_the_program_and_of_mistakes(site: Site) -> None:
    done = site.run("phos-gpu", "audit", "--json", "--", sys.executable, "-c", "raise SystemExit(5)", check=False)
    assert done.returncode == 5
    assert json.loads(done.stdout)["kernels"] == []
    done = site.run("phos-gpu", "audit", "--json", "--", "echo", "its own words")
    assert json.loads(done.stdout)["kernels"] == []
    assert "its own words" in done.stderr
    assert site.run("phos-gpu", "audit", "--", "no-such-program", check=False).returncode == 2
    missing = site.folder / "nowhere" / "file"
    assert site.run("phos-gpu", "audit", "--output", str(missing), "--", "true", check=False).returncode == 2


@pytest.mark.parametrize("option", [(), ("--json",)], ids=["tables", "json"])
def test_what_was_found_is_shown_though_its_file_cannot_be_written(site: Site, option: tuple[str, ...]) -> None:
    done = site.run("phos-gpu", "audit", "--output", "/dev/full", *option, "--", "true", check=False)
    assert (done.returncode, done.stderr) == (
        7,
        "phos-gpu audit: /dev/full could not be written: No space left on device.\n",
    )
    if option:
        assert json.loads(done.stdout)["kernels"] == []
    else:
        assert "The program made no call that writes to GPU memory." in done.stdout


def test_nothing_stays_when_it_is_over(site: Site) -> None:
    audit(site, str(PROGRAM), "kernels")
    site.wait_no_gpu_memory()


def test_a_program_outlives_phosd(site: Site) -> None:
    """It is no longer audited, and ends as it should."""
    program = site.until_awaited(
        str(launcher("phos-gpu")), "audit", "--", sys.executable, str(examples_folder() / "mlp.py"),
        "--iterations", "30", "--iteration-seconds", "0.05", "--until", under=False,
    )  # fmt: skip
    wait_until(lambda: program.iterations() > 1, "the program to compute")
    os.kill(site.daemon_pid(), signal.SIGKILL)
    program.wait_result()
    assert any("the audit ends here" in line for line in program.lines())
    assert any("phosd ended during the audit" in line for line in program.lines())

"""Every benchmark script runs from end to end on the software GPU, and its result files say what they must."""

from __future__ import annotations

import json
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.errors import DaemonUnavailable
from phos.gpu_engine.installation import launcher
from tests.integration.site import Site, wait_until

ROOT = Path(__file__).resolve().parents[2]

RESIDUE_MB = 12 * (1 << 20) / 1e6  # SOFTGPU_RESIDUE

pytestmark = pytest.mark.root

alone = pytest.mark.serial
"""It compares times, or wants something to happen while something else does: beside other tests either may fail."""


def run(site: Site, script: str, *options: str) -> subprocess.CompletedProcess[str]:
    """Run a benchmark in smoke mode."""
    results, work = site.folder / "results", site.folder / "work"
    command = [sys.executable, str(ROOT / "bench" / f"{script}.py"), "--smoke", "--results", str(results)]
    return subprocess.run(
        [*command, "--work", str(work), *options],
        env={
            **site.environment,
            "PHOS_BENCH_CRIU": str(launcher("criu")),
            "PHOS_BENCH_PHOS_GPU": str(launcher("phos-gpu")),
            "PHOS_COMMIT": "0" * 40,
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )


def smoke(site: Site, script: str, *options: str) -> dict[str, Any]:
    """Run a benchmark in smoke mode; return its one JSON file, decoded."""
    done = run(site, script, *options)
    assert done.returncode == 0, done.stdout + done.stderr
    (stored,) = (site.folder / "results").glob("*-smoke-*.json")
    assert stored.with_suffix(".md").exists()
    content: dict[str, Any] = json.loads(stored.read_text())
    assert content["environment"]["commit"] == "0" * 40
    assert content["environment"]["kernel"]
    return content


def test_jobs(site: Site) -> None:
    """Room is made for what is not zeros, and all lines are those of a job left alone."""
    rows = {row["key"]: row for row in smoke(site, "jobs", "--image", str(site.folder))["rows"]}
    for job in ("JAX", "PyTorch, DataLoader", "PyTorch, shared tensors"):
        assert rows[f"{job}, killed"]["identical"]
        assert 0 < rows[f"{job}, 1"]["stall"] < rows[f"{job}, 1"]["command"]
    assert rows["JAX, killed"]["stored_gb"] < 0.1 * rows["JAX, killed"]["gpu_gb"]


def test_dump_restore(site: Site) -> None:
    """PhOS and the driver's own checkpoint both bring every word back."""
    folder = str(site.folder)
    content = smoke(site, "dump_restore", "--memory-folder", folder, "--disk-folder", folder)
    rows = {(row["system"], row["place"]): row for row in content["rows"]}
    assert set(rows) == {(system, place) for system in ("phos", "peer") for place in ("memory", "disk")}
    assert all(row["data_right"] for row in rows.values())
    phases = rows["phos", "memory"]["phases"]
    assert {"quiesce", "detach", "driver checkpoint", "CRIU freeze and dump", "GPU data"} <= set(phases)
    assert {"lock", "checkpoint", "CRIU dump", "CRIU restore", "restore", "unlock"} == set(
        rows["peer", "disk"]["phases"]
    )


def test_dump_restore_from_disk_alone(site: Site) -> None:
    """What is not asked for is left out; the disk's own rates are measured before and after."""
    where = ("--memory-folder", str(site.folder), "--disk-folder", str(site.folder))
    content = smoke(site, "dump_restore", "--places", "disk", "--systems", "phos", "--repeats", "2", *where)
    (row,) = content["rows"]
    assert (row["system"], row["place"], row["runs"], row["data_right"]) == ("phos", "disk", 2, True)
    summary = content["summary"]
    if not any("could not be measured" in note for note in content["notes"]):  # no O_DIRECT here
        for way in ("write", "read"):
            assert summary[f"disk, sequential {way}, GB/s"] > 0
            assert len(summary[f"disk, sequential {way}, each time"].split(", ")) == 4
    wrong = run(site, "dump_restore", "--places", "disc")
    assert wrong.returncode == 2
    assert "there is no disc; choose from: memory, huge, disk" in wrong.stderr


def test_steady_state(site: Site) -> None:
    """Launches, allocations and training are measured in turns."""
    rows = {row["key"]: row for row in smoke(site, "steady_state")["rows"]}
    for key in (
        "launch, submission",
        "launch, until done",
        "cuMemAlloc 512 B",
        "cuMemFree 1 MiB",
        "cuMemAlloc 64 KiB, many",
        "training step, conv net",
        "training step, transformer",
        "training step, transformer as a CUDA graph",
    ):
        assert rows[key]["pairs"] == 4
        assert len(rows[key]["percent_by_start"]) == 2
        assert rows[key]["median_from"] <= rows[key]["percent"] <= rows[key]["median_to"]
        assert rows[key]["without"] > 0 < rows[key]["with_frontend"]
    for key, pairs in {
        "launch, submission": 3,
        "launch, until done": 3,
        "training step, conv net": 60,
        "training step, transformer": 60,
        "training step, transformer as a CUDA graph": 60,
    }.items():
        row = rows[f"{key}, in one process"]
        assert row["pairs"] == pairs
        assert row["without"] > 0 < row["with_frontend"]


def test_parts_of_steady_state(site: Site) -> None:
    """A part alone, in as many rounds as were asked for."""
    rows = smoke(site, "steady_state", "--only", "training", "--starts", "1", "--repeats", "6")["rows"]
    assert [row["pairs"] for row in rows] == [180, 180, 180, 6, 6, 6]
    assert all(row["key"].startswith("training step") for row in rows)
    wrong = run(site, "steady_state", "--only", "launch")
    assert wrong.returncode == 2
    assert "there is no launch; choose from: launches, memory, training" in wrong.stderr


def test_correctness(site: Site) -> None:
    """Runs interrupted at random moments are identical to the one left alone."""
    content = smoke(site, "correctness", "--image", str(site.folder))
    assert content["summary"]["bit-identical"] == "2 of 2 runs"


def test_toggle(site: Site) -> None:
    """Each setting of the reducers is measured, and the stall holds at least the time in which CRIU had it frozen."""
    rows = smoke(site, "toggle", "--image", str(site.folder))["rows"]
    assert len(rows) == 7
    for row in rows:
        assert row["stall_s"] >= row["CRIU freeze and dump"] > 0


@alone
def test_cow(site: Site) -> None:
    """Concurrent and other checkpoints of training are measured, and from the last one the losses repeat."""
    rows = {row["system"]: row for row in smoke(site, "cow", "--image", str(site.folder))["rows"]}
    assert set(rows) == {"cow, first", "cow", "stop", "restore", "peer"}
    cow = rows["cow"]
    assert cow["protocol"] == "cow"
    assert cow["validated"]
    assert cow["felt_stall_s"] > 0
    assert cow["committed_s"] > cow["phosd_stall_s"] > 0
    assert cow["phases"]["GPU data"] > 0
    assert cow["calls"] > 0  # the window was open long enough for a launch
    assert cow["checkpoints_an_hour"] > 0
    assert rows["restore"]["losses_identical"]


VARIANTS = {
    "pools": [("pool", "16M"), ("pool", "0")],
    "validate": [("validate", "on"), ("validate", "off")],
    "phases": [("phase", "start"), ("phase", "end")],
    "transfers": [("prioritise", "on"), ("prioritise", "off")],
}


@pytest.mark.parametrize("section", VARIANTS)
def test_cow_variants(site: Site, section: str) -> None:
    """Every setting is measured, and a checkpoint that the program asks for too."""
    content = smoke(site, "cow", "--sections", section, "--pools", "16M,0", "--image", str(site.folder))
    rows = {(row["section"], row["setting"]): row for row in content["rows"]}
    assert list(rows) == VARIANTS[section]
    for (name, setting), row in rows.items():
        assert row["protocol"] == "cow"
        assert row["felt_stall_s"] > 0
        assert row["validated"] == ((name, setting) != ("validate", "off"))
        assert row["shadowed"] == 0 or (name, setting) != ("pool", "0")


@alone
def test_cow_correctness(site: Site) -> None:
    """Every image is proven to be the state of its moment."""
    content = smoke(site, "cow_correctness", "--image", str(site.folder))
    summary = content["summary"]
    assert summary["checkpoints"] == 4
    assert summary["proven by checksum or by restoring"] == "4 of 4"
    assert summary["by copy-on-write, every chunk as its hash of t1"] == "4 of 4"
    assert summary["iterations compared with training left alone"] > 0
    assert summary["of them different"] == 0
    assert summary["the program wrote to memory that was not saved yet"] == "during 4 of 4"
    assert any(row.get("identical") for row in content["rows"])


WAYS = ("eager", "lazy, allocation order", "lazy, random order", "lazy", "lazy, fast", "eager, pinned", "lazy, pinned")
POOLS = ("pool, allocation order", "pool, random order", "pool, not pinned", "pool")


@alone
@pytest.mark.timeout(240)
def test_restore(site: Site) -> None:
    """A waiting request is answered after every kind of restore as by the process that was not interrupted."""
    content = smoke(site, "restore", "--image", str(site.folder))
    rows = {row["system"]: row for row in content["rows"]}
    assert set(rows) == {"running", *WAYS, *POOLS, "peer"}
    assert all(row["tokens_equal"] for row in rows.values())
    for name, row in rows.items():
        assert 0 < row["first_kernel_s"] <= row["first_token_s"] <= row["last_token_s"], name
    for name in WAYS:
        row = rows[name]
        assert row["mode"] == ("lazy" if "lazy" in name else "eager")
        assert 0 < row["begin_s"] < min(row["attached_s"], row["first_kernel_s"])
        assert row["last_byte_s"] > row["begin_s"]
        assert 0 < row["percent_of_copy"] < 200
        assert ("waits" in row) == ("lazy" in name)
    assert rows["running"]["kernels_pending"] == 0
    assert rows["eager"]["first_kernel_s"] > rows["eager"]["last_byte_s"] - 0.01
    assert rows["lazy"]["phosd_first_kernel_s"] == pytest.approx(rows["lazy"]["first_kernel_s"], abs=0.5)
    assert any("lazy, first kernel" in goal for goal in content["summary"])
    assert list(site.folder.glob("phos-restore-*")) == []


def test_the_order_of_prefetching(site: Site) -> None:
    """A server of several models is asked for the one made last; each row says which order it had."""
    systems = "lazy, allocation order;lazy;pool, random order;pool"
    content = smoke(site, "restore", "--models", "2", "--systems", systems, "--image", str(site.folder))
    assert [row["key"] for row in content["rows"]] == [
        "16 MB, 2 models running",
        "16 MB, 2 models lazy, allocation order",
        "16 MB, 2 models lazy",
        "16 MB, 2 models pool, random order",
        "16 MB, 2 models pool",
    ]
    assert all(row["tokens_equal"] for row in content["rows"])


def test_serverless(site: Site) -> None:
    """Whichever way the program is started, the answer is the same."""
    content = smoke(site, "serverless", "--image", str(site.folder))
    rows = {row["system"]: row for row in content["rows"]}
    assert set(rows) == {"cold", "peer", "eager", "lazy", "pool"}
    assert all(row["tokens_equal"] for row in rows.values())
    assert 0 < rows["cold"]["ready_s"] <= rows["cold"]["first_kernel_s"] <= rows["cold"]["last_token_s"]


@alone
@pytest.mark.timeout(240)
def test_lazy_correctness(site: Site) -> None:
    """The program says after its restores what it says alone; one restore is interrupted by the next checkpoint."""
    content = smoke(site, "lazy_correctness", "--image", str(site.folder))
    summary = content["summary"]
    assert summary["restores"] == summary["lazy, and no guess wrong"] == len(content["rows"]) >= 2
    assert summary["interrupted by the next checkpoint while data was loading"] == "1 of 1"
    assert summary["each request answered once, in order"]
    assert summary["compared with the program left alone"] == summary["answers"] > 4
    assert summary["of them different"] == 0
    (interrupted,) = (row for row in content["rows"] if row["interrupted"])
    assert interrupted["asked_to_interrupt"]
    assert interrupted["asked_before_last_byte_s"] > 0


def test_soak(site: Site) -> None:
    """Every kind of round has a row for each thing that may grow."""
    content = smoke(site, "soak", "--image", str(site.folder))
    rows = {row["key"]: row for row in content["rows"]}
    assert not content["notes"]
    for kind in ("cow", "stop", "restore", "lazy"):
        for who in ("phosd", "keeper", "program"):
            assert rows[f"{kind}, {who}: descriptors"]["rounds"] == 1
            assert rows[f"{kind}, {who}: private MB"]["last_quarter"] > 0
        assert rows[f"{kind}, image: MB"]["last_quarter"] > 10
    assert "programs, program: threads" not in rows
    assert rows["programs, phosd: threads"]["grew"] == "not judged"  # one round shows nothing


def test_audit(site: Site) -> None:
    """Each program has a row for each source, and the sources are added up."""
    content = smoke(site, "audit")
    rows = {row["key"]: row for row in content["rows"]}
    assert {row["program"] for row in rows.values()} == {
        "example pointer_chase",
        "example struct_argument",
        "Rodinia-like, PTX",
    }
    assert rows["Rodinia-like, PTX: ptx"]["kernels"] == 3
    assert rows["Rodinia-like, PTX: ptx"]["audited"] == 9  # the first three of each
    assert all(row["written_chunks"] <= row["predicted_chunks"] for row in rows.values())
    assert content["summary"] == {"success, call": 1, "success, ptx": 1}
    assert not content["notes"]


def test_an_audit_says_what_it_leaves_out(site: Site) -> None:
    """Parts of names are looked for in any case; what matches nothing, or has no time, is said."""
    late = run(site, "audit", "--only", "RODINIA,Pointer", "--budget", "1")
    assert late.returncode == 1
    assert "There was no time left for: example pointer_chase; Rodinia-like, PTX." in late.stdout
    wrong = run(site, "audit", "--only", "nothing")
    assert wrong.returncode == 1
    assert "no program has that in its name. There are: example pointer_chase;" in wrong.stderr


@alone
def test_criu_freeze(site: Site) -> None:
    """The parts of the stall, and CRIU's own figures, with what the driver saves in CRIU's pages and without."""
    by_criu = "all, pages copied by CRIU"
    choose = (
        "--only",
        "none",
        "--only",
        "all",
        "--only",
        by_criu,
        "--host-bytes",
        "8000000",
        "--gaps",
        "--image",
        str(site.folder),
    )
    rows = {row["key"]: row for row in smoke(site, "criu_freeze", *choose)["rows"]}
    assert set(rows) == {"none", "all", by_criu}
    for row in rows.values():
        assert row["stall_s"] >= row["CRIU freeze and dump"] > 0
        assert (
            row["stall_s"] >= row["criu_frozen_seconds"] > 0
        )  # lets the tasks go a little after phosd has heard of it
        assert row["gaps"][0][0] >= row["gaps"][-1][0] > 0
        assert sum(row["private_bytes"].values()) > 1 << 20
    assert rows["all"]["criu_pages_mb"] < rows["none"]["criu_pages_mb"] - 8
    assert rows["all"]["prepare residue"] > 0
    assert rows["all"]["merge CPU pages"] > 0
    assert rows["all"]["prepare CPU pages"] > 0
    assert "prepare CPU pages" not in rows[by_criu]
    assert rows[by_criu]["criu_memory_write_seconds"] > rows["all"]["criu_memory_write_seconds"]


@alone
def test_image_io(site: Site) -> None:
    """A row for each way to have room, in a file system in memory."""
    rows = {row["key"]: row for row in smoke(site, "image_io", "--image", "/dev/shm")["rows"]}
    none, reserve, place = (rows[f"{room}, /dev/shm"] for room in ("none", "reserve", "place"))
    assert all(row["write_GB_s"] > 0 < row["read_GB_s"] for row in rows.values())
    assert none["room_s"] < reserve["room_s"]
    assert none["room_s"] < place["room_s"]


def test_descriptors(site: Site) -> None:
    """The two kernels of a PTX file of ours: one hashes what is there, the other what arrives."""
    content = smoke(site, "descriptors", "--every", "1", str(ROOT / "gpu_engine" / "content_hash.ptx"))
    (row,) = content["rows"]
    assert row["kernels"] == row["described"] == row["ptx"] > 1
    assert row["guessed"] == 0


def test_page_lock(site: Site) -> None:
    content = smoke(site, "page_lock", "--image", "/dev/shm")
    assert {row["key"] for row in content["rows"]} == {
        f"{pages} pages, {threads} threads" for pages in ("huge", "small") for threads in (1, 2, 4, 8)
    }
    assert all(row["copied_gb_s"] > 0 for row in content["rows"])


def test_copy_load(site: Site) -> None:
    """A row for each load, and what was copied where there was one."""
    rows = {row["key"]: row for row in smoke(site, "copy_load")["rows"]}
    loaded = {
        "16 MiB, 2",
        "4 MiB, 1, half the time",
        "to the GPU: 4 MiB, 16, and 64 bytes back",
        "to the GPU: 4 MiB, 16, hashed",
        "4 MiB, 8, by kernels",
        "2 MiB, 1, as within the GPU",
    }
    assert set(rows) == {"none", *loaded}
    assert all(row["import_us"] > 0 < row["map_us"] and row["restore_s"] > 0 for row in rows.values())
    assert "copied_gb_s" not in rows["none"]
    assert all(rows[key]["copied_gb_s"] > 0 for key in loaded)


def test_driver_calls(site: Site) -> None:
    """What the software GPU saves of a context, and restores, is copied by memcpy(), to the byte."""
    content = smoke(site, "driver_calls", "--image", str(site.folder), "--repeats", "2")
    rows = {row["key"]: row for row in content["rows"]}
    for step in ("driver checkpoint", "driver restore"):
        assert rows[f"{step}: memcpy"]["mb"] == RESIDUE_MB
        assert rows[f"{step}: memcpy"]["ms"] > 0
        assert rows[f"{step}: all"]["calls"] >= rows[f"{step}: memcpy"]["calls"] > 0
        assert rows[f"{step}: all"]["ms"] > 0


def test_ungated(site: Site) -> None:
    """What passes no gate is answered as ever meanwhile; of the rest some wait for the restore, and some crash."""
    rows = {row["key"]: row for row in smoke(site, "ungated")["rows"]}
    assert "cuCtxPushCurrent, cuCtxPopCurrent" in rows
    for row in rows.values():
        assert row["wrong"] == 0
        crashes = "(own)" in row["key"] or row["key"] in ("cuStreamQuery", "cuEventQuery", "all of them")
        assert row["refused"] == ("the process crashed" if crashes else "")
        if not crashes and not row["key"].startswith("all "):
            assert (row["answered_meanwhile"] == 0 < row["waited"]) is row["gated"]


def program(folder: Path, name: str, text: str) -> None:
    """A program as others write them."""
    (folder / name).mkdir(parents=True)
    file = folder / name / "program"
    file.write_text(text)
    file.chmod(0o755)


def committed(site: Site) -> int:
    """How many checkpoints phosd has made; none where it does not run."""
    try:
        return sum(job["state"] == "committed" for job in site.status()["jobs"])
    except DaemonUnavailable:
        return 0


def test_unmodified(site: Site) -> None:
    """What ends well in each way, what does not under PhOS alone, and what never does."""
    programs = site.folder / "programs"
    example = ROOT / "examples" / "mlp.py"
    mlp = f"exec {sys.executable} {example} --iterations 40 --iteration-seconds 0.1"
    go = site.folder / "go"  # what is guarded goes on to its end when it has been checkpointed twice
    until = f'for images in {site.folder}/phos-bench-*-good; do [ ! -d "$images" ] || until="--until {go}"; done'
    program(programs, "good", f"#!/bin/sh\n{until}\n{mlp} $until\n")
    program(programs, "particular", f'#!/bin/sh\n[ -z "$LD_PRELOAD" ] || exit 3\n{mlp}\n')
    program(programs, "broken", "#!/bin/sh\necho no; exit 4\n")
    with ThreadPoolExecutor(1) as beside:
        running = beside.submit(run, site, "unmodified", "--programs", str(programs), "--image", str(site.folder))
        wait_until(lambda: committed(site) >= 2 or running.done(), "two checkpoints", 160)
        go.touch()
        done = running.result()
    assert done.returncode == 1, done.stdout + done.stderr
    (stored,) = (site.folder / "results").glob("*-smoke-unmodified.json")
    content = json.loads(stored.read_text())
    rows = {row["key"]: row for row in content["rows"]}
    assert set(rows) == {"good", "particular"}
    assert (rows["good"]["under PhOS"], rows["good"]["guarded"]) == ("well", "well")
    assert rows["good"]["checkpoints"] >= 2
    assert rows["particular"]["under PhOS"].startswith("status 3")
    assert content["notes"] == ["broken: left out, for alone it ends with status 4: no."]
    assert content["summary"]["of these under PhOS"] == 1

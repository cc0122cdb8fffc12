"""install.sh for real: a bundle is made from this clone, carried, set up, used and removed. Needs apt and pip."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = f"{sys.version_info.major}.{sys.version_info.minor}"

pytestmark = [pytest.mark.network, pytest.mark.timeout(600)]


def clean_environment() -> dict[str, str]:
    return {key: value for key, value in os.environ.items() if not key.startswith(("PHOS", "PYTHON"))}


def call(*command: str | Path, check: bool = True) -> subprocess.CompletedProcess[str]:
    done = subprocess.run(
        [str(word) for word in command],
        env=clean_environment(),
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert not check or done.returncode == 0, done.stdout
    return done


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A bundle for this Python, moved away from where it was made."""
    folder = tmp_path_factory.mktemp("bundle")
    made = folder / "made"
    call(ROOT / "install.sh", "--bundle", made, "--for-python", PYTHON, "--omit", "nvidia-cuda-nvrtc")
    carried = folder / "carried-along"
    made.rename(carried)
    return carried


@pytest.fixture(scope="module")
def installed(bundle: Path) -> Path:
    """The bundle, set up where it lies."""
    call(bundle / "install.sh", "--offline", "--python", sys.executable)
    return bundle


def files(folder: Path) -> set[str]:
    return {str(path.relative_to(folder)) for path in folder.rglob("*") if "__pycache__" not in path.parts}


def size(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file() and not path.is_symlink())


def test_a_bundle_is_small_and_whole(bundle: Path) -> None:
    home = bundle / "lib" / "phos"
    for part in ("lib/libphos.so", "softgpu/libcuda.so.1", "plugin/phos_plugin.so", "criu/bin/criu", "bin/criu"):
        assert (home / part).is_file(), part
    assert [path.name for path in (home / "plugin").iterdir()] == ["phos_plugin.so"]
    assert size(bundle) < 60e6
    history = subprocess.run(["git", "-C", ROOT, "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    if history.returncode == 0 and (ROOT / ".git").exists():
        assert (home / "commit").read_text().split()[0] == history.stdout.strip()
    assert not [path for path in bundle.rglob("*") if path.is_symlink() and not path.resolve().is_relative_to(bundle)]


MISSING = """
import sys
sys.path.insert(0, sys.argv[1])
import audit, jobs, process
scripts = [process.TEST_PROGRAMS / f"{program}.py" for _, program, *_ in audit.TESTED]
for job in jobs.JOBS.values():
    scripts += [jobs.GPU_PROGRAMS / job.script, jobs.SMOKE_PROGRAMS / (job.smoke or "unused_memory.py")]
print([str(script) for script in scripts if not script.is_file()])
"""
"""What benchmarks run of the tests' programs and do not find."""


def test_a_carried_bundle_works(installed: Path) -> None:
    assert "Version: 4." in call(installed / "bin" / "criu", "--version").stdout
    assert "The PhOS daemon" in call(installed / "bin" / "phosd", "--help").stdout
    python = installed / "lib" / "phos" / "venv" / "bin" / "python"
    where = call(python, "-I", "-c", "import phos.images.reader, pycriu, cuda.bindings; print(phos.__file__)").stdout
    assert Path(where.strip()).is_relative_to(installed)
    # The examples and the benchmarks came along, and find each other.
    assert (installed / "lib" / "phos" / "examples" / "mlp.py").is_file()
    assert "--smoke" in call(installed / "bin" / "phos-gpu", "bench", "steady_state", "--help").stdout
    assert not (installed / "lib" / "phos" / "bench" / "results").exists()
    hooks = "import sys; sys.path.insert(0, sys.argv[1]); import bypass; print(len(list(bypass.Bypass._functions())))"
    programs = str(installed / "lib" / "phos" / "bench" / "programs")
    assert int(call(python, "-IB", "-c", hooks, programs).stdout) > 500
    assert call(python, "-IB", "-c", MISSING, str(Path(programs).parent)).stdout == "[]\n"


def test_no_call_leaves_a_file(bundle: Path, tmp_path: Path) -> None:
    """Others than root could keep none, and compile everything at each call; root's a user could not remove."""
    prefix = tmp_path / "prefix"
    call(bundle / "install.sh", "--offline", "--prefix", prefix, "--python", sys.executable)
    before = set(prefix.rglob("*"))
    for words in (
        ["doctor"],
        ["status"],
        ["restore", "--help"],
        ["guard", "--help"],
        ["bench", "steady_state", "--help"],
    ):
        call(prefix / "bin" / "phos-gpu", *words, check=False)
    assert set(prefix.rglob("*")) - before == set()


def test_no_file_remembers_the_clone(installed: Path) -> None:
    needle = str(ROOT).encode()
    text = [path for path in (installed / "lib/phos/bin").iterdir() if path.is_file()]
    text += [path for path in installed.rglob("*.py") if "venv" not in path.parts]
    assert text
    assert [path for path in text if needle in path.read_bytes()] == []


def test_setting_up_twice_changes_nothing(installed: Path) -> None:
    before = files(installed)
    call(installed / "install.sh", "--offline", "--python", sys.executable)
    assert files(installed) == before


def test_a_package_that_is_nowhere_is_named(bundle: Path, tmp_path: Path) -> None:
    poor = tmp_path / "poor"
    shutil.copytree(bundle, poor, symlinks=True, ignore=shutil.ignore_patterns("venv", "xxhash-*.whl"))
    base = Path(sys.base_prefix, "bin", f"python{PYTHON}")
    if subprocess.run([base, "-I", "-c", "import xxhash"], capture_output=True, check=False).returncode == 0:
        pytest.skip("this machine's own Python has xxhash")
    done = call(poor / "install.sh", "--offline", "--python", base, check=False)
    assert done.returncode == 1
    assert "lacks xxhash" in done.stdout
    # What the other machine's Python has need not be carried.
    parent = tmp_path / "parent"
    call(base, "-m", "venv", "--without-pip", parent)
    site = next(parent.glob("lib/python*/site-packages"))
    (site / "xxhash.py").write_text("")
    call(poor / "install.sh", "--offline", "--python", parent / "bin" / "python")


def test_a_bundle_takes_the_place_of_a_developers_installation(bundle: Path, tmp_path: Path) -> None:
    """Not of the clone that it links to; a process that has a library mapped keeps that; nothing old is unpacked."""
    home = tmp_path / "prefix" / "lib" / "phos"
    (home / "lib").mkdir(parents=True)
    (home / "wheels").mkdir()
    (home / "criu.path").touch()
    shutil.copy(next(bundle.rglob("phos-*.whl")), home / "wheels" / "phos-0.0.0-py3-none-any.whl")
    clone = tmp_path / "clone"
    clone.mkdir()
    (clone / "libphos.so").write_text("the clone's")
    (home / "lib" / "libphos.so").symlink_to(clone / "libphos.so")
    (home / "examples").symlink_to(clone)
    (home / "lib" / "phos-can-fill").write_text("mapped")
    with open(home / "lib" / "phos-can-fill", encoding="utf-8") as mapped:
        call(bundle / "install.sh", "--offline", "--prefix", tmp_path / "prefix", "--python", sys.executable)
        assert mapped.read() == "mapped"
    assert {path.name: path.read_text() for path in clone.iterdir()} == {"libphos.so": "the clone's"}
    assert not (home / "examples").is_symlink()
    assert [path.name for path in home.glob("wheels/phos-*")] == [path.name for path in bundle.rglob("phos-*.whl")]


def test_uninstall_leaves_nothing(bundle: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    call(bundle / "install.sh", "--offline", "--prefix", prefix, "--python", sys.executable)
    assert (prefix / "bin" / "phos-gpu").exists()
    call(prefix / "install.sh", "--uninstall")
    assert not prefix.exists()


def test_an_environment_whose_python_is_gone_says_what_to_do(bundle: Path, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(bundle, bare, symlinks=True, ignore=shutil.ignore_patterns("venv"))
    done = call(bare / "bin" / "phos-gpu", "status", check=False)
    assert done.returncode == 127
    assert f"{bare}/lib/phos/install.sh --offline" in done.stdout
    python = bare / "lib" / "phos" / "venv" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.symlink_to(tmp_path / "gone")
    done = call(bare / "bin" / "phos-gpu", "status", check=False)
    assert done.returncode == 127
    assert "its Python is gone or not yours to run" in done.stdout


@pytest.fixture
def sleeper() -> Iterator[int]:
    """A process that CRIU can dump: in a session of its own, no terminal, no pipe. Ends with the test."""
    process = subprocess.Popen(
        ["sleep", "600"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        env=clean_environment(),
    )
    yield process.pid
    try:
        os.kill(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        pass
    process.poll()


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root")
def test_the_private_criu_dumps_and_restores(installed: Path, sleeper: int, tmp_path: Path) -> None:
    criu = installed / "bin" / "criu"
    call(criu, "dump", "-t", str(sleeper), "-D", tmp_path, "-o", "dump.log")
    os.waitpid(sleeper, 0)
    call(criu, "restore", "-d", "-D", tmp_path, "-o", "restore.log")
    time.sleep(0.05)
    assert Path(f"/proc/{sleeper}/comm").read_text() == "sleep\n"


@pytest.mark.root
@pytest.mark.skipif(os.geteuid() != 0, reason="CRIU needs root")
def test_criu_is_called_criu_while_it_runs(installed: Path, tmp_path: Path) -> None:
    """People look for it with pgrep, and end it with killall."""
    with subprocess.Popen(
        [installed / "bin" / "criu", "service", "--address", tmp_path / "socket"], env=clean_environment()
    ) as service:
        try:
            deadline = time.monotonic() + 10
            while not (tmp_path / "socket").exists():
                assert time.monotonic() < deadline
                time.sleep(0.01)
            assert Path(f"/proc/{service.pid}/comm").read_text() == "criu\n"
        finally:
            service.terminate()
    assert service.returncode == -signal.SIGTERM

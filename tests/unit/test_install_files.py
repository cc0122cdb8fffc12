"""What the installation is made of, without installing: scripts, the package's contents, the doctor, the tools."""

from __future__ import annotations

import fcntl
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from click.testing import CliRunner

from phos.cli import doctor, probes
from tests.unit.as_user import NOBODY, needs_root
from tests.unit.packaging_script import packaging_script

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = [
    "install.sh",
    ".ci/run",
    *(f"packaging/{name}" for name in ("criu", "phosd", "phos-gpu", "layout.sh", "fetch-criu")),
    *(f"tests/machines/{name}" for name in ("fresh_machine.sh", "tried_inside.sh")),
]


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_parse(script: str) -> None:
    text = (ROOT / script).read_text()
    shell = "bash" if text.startswith("#!/bin/bash") else "sh"
    subprocess.run([shell, "-n", str(ROOT / script)], check=True)


@pytest.mark.parametrize("script", [script for script in SCRIPTS if script != "packaging/layout.sh"])
def test_scripts_can_be_run(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize("script", SCRIPTS)
def test_scripts_name_no_registry(script: str) -> None:
    """Packages come from where this machine's apt and pip are configured to get them."""
    assert not re.search(r"https?://", (ROOT / script).read_text())


def test_help_lists_every_option() -> None:
    text = subprocess.run([ROOT / "install.sh", "--help"], capture_output=True, text=True, check=True).stdout
    parsed = set(re.findall(r"^    (--[a-z-]+)\)", (ROOT / "install.sh").read_text(), re.M))
    assert parsed
    assert [option for option in sorted(parsed) if option not in text] == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["--no-such"],
        ["--prefix"],
        ["--prefix", ""],
        ["--prefix="],
        ["--python=/bin/false", "--prefix", "--check"],
        ["extra"],
        ["--offline"],
    ]
    + [[f"--prefix={name}"] for name in ("a b", "a:b/c", "a;b")],
)
def test_bad_options_are_refused(arguments: list[str], tmp_path: Path) -> None:
    done = subprocess.run([ROOT / "install.sh", *arguments], capture_output=True, text=True, check=False, cwd=tmp_path)
    assert done.returncode == 1
    assert done.stderr.startswith("install.sh: ")
    assert list(tmp_path.iterdir()) == []


def test_uninstalling_nothing_harms_nothing(tmp_path: Path) -> None:
    for name in ("bin/criu", "bin/other", "lib/libother.so", "sbin/criu"):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("someone else's")
    before = sorted(tmp_path.rglob("*"))
    words = [ROOT / "install.sh", "--prefix", tmp_path, "--uninstall"]
    done = subprocess.run(words, check=True, capture_output=True, text=True)
    assert sorted(tmp_path.rglob("*")) == before
    assert done.stdout == f"PhOS is not installed in {tmp_path}: nothing was removed.\n"


def test_a_folder_without_an_installation_is_not_ours_to_remove(tmp_path: Path) -> None:
    words = [ROOT / "install.sh", "--prefix", tmp_path / "empty", "--uninstall"]
    (tmp_path / "empty").mkdir()
    subprocess.run(words, check=True, capture_output=True)
    assert (tmp_path / "empty").is_dir()


def test_uninstall_names_no_phosd_of_another_installation(tmp_path: Path) -> None:
    python = {}
    for prefix in ("this", "other"):
        python[prefix] = tmp_path / prefix / "lib" / "phos" / "venv" / "bin" / "python"
        python[prefix].parent.mkdir(parents=True)
        python[prefix].symlink_to(sys.executable)
        (tmp_path / prefix / "lib" / "phos" / "criu.path").touch()
    code = "import sys; sys.stdin.read()"
    words = ["-c", code, "-m", "phos.gpu_engine.daemon"]
    running = [subprocess.Popen([program, *words], stdin=subprocess.PIPE) for program in python.values()]
    uninstall = [ROOT / "install.sh", "--prefix", tmp_path / "this", "--uninstall"]
    done = subprocess.run(uninstall, check=True, capture_output=True, text=True)
    for process in running:
        process.communicate()
    assert f"phosd still runs (process {running[0].pid}): " in done.stdout


def test_uninstall_removes_what_is_ours_and_brings_back_what_was_there(tmp_path: Path) -> None:
    home = tmp_path / "lib" / "phos"
    (home / "bin").mkdir(parents=True)
    (home / "displaced" / "bin").mkdir(parents=True)
    (home / "displaced" / "bin" / "criu").write_text("someone else's")
    (tmp_path / "bin").mkdir()
    (home / "bin" / "layout.sh").touch()
    for command in ("criu", "phos-gpu", "phosd"):
        (home / "bin" / command).touch()
        (tmp_path / "bin" / command).symlink_to(f"../lib/phos/bin/{command}")
    subprocess.run([ROOT / "install.sh", "--prefix", tmp_path, "--uninstall"], check=True, capture_output=True)
    assert [str(path.relative_to(tmp_path)) for path in sorted(tmp_path.rglob("*"))] == ["bin", "bin/criu"]
    assert (tmp_path / "bin" / "criu").read_text() == "someone else's"


@needs_root
@pytest.mark.parametrize("locked", ["bin", "lib"])
def test_uninstall_says_who_could_where_this_user_cannot(locked: str) -> None:
    with tempfile.TemporaryDirectory(prefix="phos-test-", dir="/tmp") as name:  # pytest's folders are for one user
        prefix = Path(name)
        home = prefix / "lib" / "phos"
        (home / "bin").mkdir(parents=True)
        (home / "bin" / "layout.sh").touch()
        (prefix / "bin").mkdir()
        (prefix / "bin" / "criu").symlink_to("../lib/phos/bin/criu")
        script = shutil.copy(ROOT / "install.sh", prefix / "script")
        for path in (prefix, *prefix.rglob("*")):
            os.chown(path, NOBODY, NOBODY, follow_symlinks=False)
        for path in (prefix / locked, *(prefix / locked).rglob("*")):
            os.chown(path, 0, 0, follow_symlinks=False)
        before = sorted(prefix.rglob("*"))
        done = subprocess.run(
            [script, "--prefix", prefix, "--uninstall"],
            user=NOBODY,
            group=NOBODY,
            extra_groups=[],
            cwd="/",
            capture_output=True,
            text=True,
            check=False,
        )
        place = prefix / "bin" if locked == "bin" else home
        said = f"install.sh: {place} cannot be written, so nothing was removed; run as root, or as who installed it.\n"
        assert (done.returncode, done.stderr, done.stdout) == (1, said, "")
        assert sorted(prefix.rglob("*")) == before


@contextmanager
def at_work(folder: Path, *command: str | Path) -> Iterator[subprocess.Popen[str]]:
    """A command, while somebody else has the folder locked until the end of the block; after it, it has ended."""
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        try:
            yield process
        finally:
            os.close(descriptor)
            process.communicate(timeout=60)


def test_there_is_one_at_a_time_in_a_prefix(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    layout = prefix / "lib" / "phos" / "bin" / "layout.sh"
    layout.parent.mkdir(parents=True)
    layout.touch()
    command = (ROOT / "install.sh", "--prefix", prefix, "--uninstall")
    with at_work(prefix, *command) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith(f"Another install.sh is at work in {prefix}")
        assert layout.exists()
    assert process.returncode == 0
    assert not prefix.exists()


def test_who_waits_does_not_go_on_in_a_folder_that_is_gone(tmp_path: Path) -> None:
    prefix = tmp_path / "prefix"
    prefix.mkdir()
    with at_work(prefix, ROOT / "install.sh", "--prefix", prefix, "--uninstall") as process:
        assert process.stdout is not None
        process.stdout.readline()
        prefix.rmdir()
    assert process.returncode == 1


def test_the_tests_do_not_run_twice_at_a_time_in_a_clone(tmp_path: Path) -> None:
    script = Path(shutil.copytree(ROOT / ".ci", tmp_path / ".ci"), "run")
    with at_work(script.parent, script) as process:
        assert process.stdout is not None
        assert process.stdout.readline().startswith("another .ci/run is at work in ")
    assert process.returncode == 1


def test_an_apt_that_does_not_work_has_the_word(tmp_path: Path) -> None:
    """Nothing was said, and install.sh pointed at "the message above"."""
    (tmp_path / "apt-get").write_text("#!/bin/sh\necho 'E: It is broken.' >&2; exit 100\n")
    (tmp_path / "apt-get").chmod(0o755)
    environment = {name: value for name, value in os.environ.items() if "PHOS_DEBIAN" not in name}
    said = subprocess.run(
        [ROOT / "packaging" / "fetch-criu", tmp_path / "criu"],
        env={**environment, "PATH": f"{tmp_path}:{environment['PATH']}"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert said.returncode == 1
    assert "E: It is broken." in said.stderr
    assert "fetch-criu: no mirror that this machine's apt knows offers CRIU" in said.stderr


def test_a_header_that_could_not_be_written_whole_is_fetched_again(tmp_path: Path) -> None:
    """For want of room, for example: the next run would take what there is of it for the header."""
    with zipfile.ZipFile(tmp_path / "x.whl", "w", zipfile.ZIP_DEFLATED) as wheel:  # itself it is small
        for name, size in (("cuda.h", 1 << 20), ("cudaTypedefs.h", 100)):
            wheel.writestr(f"nvidia/cu13/include/{name}", bytes(size))
    (function,) = re.findall(r"^fetch_cuda_header\(\) \{.*?^\}$", (ROOT / "install.sh").read_text(), re.M | re.S)
    # Stand-ins for what it calls; `pip download` gets the wheel.
    calls = f'fail() {{ exit 1; }}; step() {{ :; }}; say() {{ echo $*; }}; pip() {{ cp {tmp_path}/x.whl "$6"; }}'
    script = f"set -eu; {calls}; source={tmp_path}/clone; base_python={sys.executable}; {function}; fetch_cuda_header"
    environment = {name: value for name, value in os.environ.items() if name != "CUDA_INCLUDE"}
    done = subprocess.run(["bash", "-c", f"ulimit -f 100; {script}"], env=environment, capture_output=True, check=False)
    assert done.returncode != 0
    done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
    assert done.stdout == "from nvidia-cuda-runtime 13.5\n", done.stderr
    header = tmp_path / "clone" / "build" / "cuda" / "include" / "cuda.h"
    assert header.stat().st_size == 1 << 20

    # One of an older CUDA is not taken for it: an older clone fetched it, or a toolkit has it.
    for version, said in (("13050", "already there\n"), ("13000", "from nvidia-cuda-runtime 13.5\n")):
        header.write_text(f"#define CUDA_VERSION {version}\n")
        done = subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, check=False)
        assert done.stdout == said, done.stderr
    for version, said in (("13050", f"from {header.parent}, as CUDA_INCLUDE says\n"), ("13000", "")):
        header.write_text(f"#define CUDA_VERSION {version}\n")
        named = {**environment, "CUDA_INCLUDE": str(header.parent)}
        done = subprocess.run(["bash", "-c", script], env=named, capture_output=True, text=True, check=False)
        assert (done.stdout, done.returncode) == (said, 0 if said else 1), done.stderr


def test_another_script_of_that_name_stays(tmp_path: Path) -> None:
    """A prefix may be somebody's folder with an install.sh of its own, and a bundle's be the clone's."""
    (function,) = re.findall(r"^link_script\(\) \{.*?^\}$", (ROOT / "install.sh").read_text(), re.M | re.S)
    command = ["bash", "-euc", f"say() {{ :; }}; {function}; link_script; link_script"]
    environment = {**os.environ, "prefix": str(tmp_path), "home": f"{tmp_path}/lib/phos"}
    subprocess.run(command, env=environment, check=True)
    script = tmp_path / "install.sh"
    assert os.readlink(script) == "lib/phos/install.sh"
    script.unlink()
    script.write_text("somebody's")
    subprocess.run(command, env=environment, check=True)
    assert script.read_text() == "somebody's"


def test_uninstall_overwrites_nothing_that_came_later(tmp_path: Path) -> None:
    displaced = tmp_path / "lib" / "phos" / "displaced" / "bin"
    displaced.mkdir(parents=True)
    (displaced / "criu").write_text("of before")
    (tmp_path / "lib" / "phos" / "criu.path").touch()
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "criu").write_text("of later")
    subprocess.run([ROOT / "install.sh", "--prefix", tmp_path, "--uninstall"], check=True, capture_output=True)
    assert {path.name: path.read_text() for path in (tmp_path / "bin").iterdir()} == {
        "criu": "of later",
        "criu.before-phos": "of before",
    }


def refused(*words: str | Path) -> str:
    """What install.sh says, which ends with status 1."""
    done = subprocess.run(list(words), capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout) == (1, "")
    return done.stderr


@pytest.mark.parametrize("option", ["--uninstall", "--python=/bin/false"])
def test_a_folder_that_is_not_of_our_making_stays_as_it_is(option: str, tmp_path: Path) -> None:
    home = tmp_path / "lib" / "phos"
    (home / "bin").mkdir(parents=True)
    (home / "thesis").write_text("someone else's")
    assert "is not of PhOS's making: nothing " in refused(ROOT / "install.sh", "--prefix", tmp_path, option)
    assert sorted(path.name for path in home.iterdir()) == ["bin", "thesis"]


@pytest.mark.parametrize("option", ["--uninstall", "--python=/bin/false"])
def test_a_clone_in_the_place_of_an_installation_stays_as_it_is(option: str, tmp_path: Path) -> None:
    home = tmp_path / "lib" / "phos"
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "layout.sh").touch()  # an earlier install.sh installed into it
    shutil.copy(ROOT / "install.sh", home)
    assert "the clone that this script is in: nothing " in refused(home / "install.sh", "--prefix", tmp_path, option)
    (home / ".git").mkdir()
    assert f"{home} is a clone: nothing " in refused(ROOT / "install.sh", "--prefix", tmp_path, option)
    assert sorted(path.name for path in home.iterdir()) == [".git", "bin", "install.sh"]


@pytest.mark.parametrize("begun", ["", "criu.new/bin", "criu/version/x", "bin/layout.sh/x"])
def test_an_installation_that_came_to_nothing_can_be_removed(begun: str, tmp_path: Path) -> None:
    (tmp_path / "prefix" / "lib" / "phos" / begun).mkdir(parents=True)
    words = [ROOT / "install.sh", "--prefix", tmp_path / "prefix", "--uninstall"]
    subprocess.run(words, check=True, capture_output=True)
    assert list(tmp_path.iterdir()) == []


def test_a_blank_in_a_path_is_a_part_of_it(tmp_path: Path) -> None:
    """Of the clone, of the prefix, of a Python."""
    place = str(tmp_path / "with a blank")
    settings = [f"{name}={place}" for name in ("CUDA_INCLUDE", "CRIU_INCLUDE", "PYTHON")]
    shown = subprocess.run(
        ["make", "-n", "-B", f"BUILD={tmp_path}/build", *settings, "build", "lint"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    ).stdout.splitlines()
    compiled = [shlex.split(line) for line in shown if "-isystem" in line]
    assert {words[-1].split("/")[0] for words in compiled} == {"frontend", "softgpu", "criu_plugin"}
    assert {words[words.index("-isystem") + 1] for words in compiled} == {place}
    assert {shlex.split(line)[0] for line in shown if place in line and "-isystem" not in line} == {place}


def test_what_is_installed_is_what_was_built(tmp_path: Path) -> None:
    """Whatever a variable of that name says in the environment of a build machine."""
    (build,) = re.findall(r"^build_native\(\) \{.*?^\}$", (ROOT / "install.sh").read_text(), re.M | re.S)
    script = "set -eu; step() { :; }; say() { :; }; fail() { echo $*; exit 1; }; "
    script += f'make() {{ command make -n -B "$@" >"{tmp_path}/shown"; }}\n{build}\nbuild_native'
    places = {"source": str(ROOT), "base_python": sys.executable, "cuda_include": "/cuda", "criu_include": "/criu"}
    subprocess.run(["bash", "-c", script], env={**os.environ, **places, "BUILD": "release"}, check=True)
    linked = re.findall(r" -o (\S+\.so\S*)", (tmp_path / "shown").read_text())
    assert "build/lib/libphos.so" in linked
    assert {library.split("/")[0] for library in linked} == {"build"}


@pytest.mark.parametrize("mode", ["install", "bundle"])
def test_an_installation_keeps_nothing_that_would_set_up_the_bundle_of_before(mode: str, tmp_path: Path) -> None:
    """Its script, run again, put the Python part of the older release beside the new libraries."""
    text = (ROOT / "install.sh").read_text()
    (files,) = re.findall(r"^install_files\(\) \{.*?^\}$", text, re.M | re.S)
    script = 'set -euo pipefail; put() { mkdir -p "$2"; }; dev=\n'
    for other in ("step", "install_package", "install_commit", "install_links", "install_unit"):
        script += f"{other}() {{ :; }}\n"
    home = tmp_path / "lib" / "phos"
    (home / "wheels").mkdir(parents=True)
    (home / "packaging").mkdir()
    (home / "install.sh").touch()
    (tmp_path / "install.sh").symlink_to("lib/phos/install.sh")
    places = {"source": str(ROOT), "prefix": str(tmp_path), "home": str(home), "mode": mode}
    subprocess.run(["bash", "-c", f"{script}{files}\ninstall_files"], env={**os.environ, **places}, check=True)
    left = [
        path
        for path in (home / "wheels", home / "packaging", home / "install.sh", tmp_path / "install.sh")
        if path.exists()
    ]
    assert len(left) == (4 if mode == "bundle" else 0)
    assert (tmp_path / "install.sh").is_symlink() == (mode == "bundle")


BASE_PYTHON = """#!/bin/sh
# A Python that makes environments of itself.
case $* in
*_base_executable*) echo NAME ;;
*"-m venv"*) for folder; do :; done; mkdir -p "$folder/bin"; cp "$0" "$folder/bin/python" ;;
esac
"""


def test_another_python_makes_another_environment(tmp_path: Path) -> None:
    text = (ROOT / "install.sh").read_text()
    wanted = re.findall(r"^(?:interpreter\(\) \{ .* \}|make_environment\(\) \{.*?^\})$", text, re.M | re.S)
    script = "set -eu; step() { :; }; say() { :; }; pip() { :; }; requirements() { seq 9; }; install_pycriu() { :; }\n"
    script += "\n".join([*wanted, "make_environment"])
    for name in ("one", "two"):
        (tmp_path / name).write_text(BASE_PYTHON.replace("NAME", name))
        (tmp_path / name).chmod(0o755)
    venv = tmp_path / "home" / "venv"

    def run(base: str, asked: str = "") -> list[str]:
        """The environment's base, and whether it is the one of before."""
        variables = {"home": tmp_path / "home", "base_python": tmp_path / base, "python_wanted": asked, "dev": ""}
        environment = {**os.environ, **{key: str(value) for key, value in variables.items()}}
        subprocess.run(["bash", "-c", script], env=environment, check=True, capture_output=True)
        (kept,) = re.findall("echo (.*) ;;", (venv / "bin" / "python").read_text())
        found = [kept, "as before" if (venv / "mark").exists() else "anew"]
        (venv / "mark").touch()
        return found

    assert run("one") == ["one", "anew"]
    assert run("two") == ["one", "as before"]
    assert run("one", "one") == ["one", "as before"]
    assert run("two", "two") == ["two", "anew"]


def test_everybody_can_run_what_root_installs_under_a_closed_umask(tmp_path: Path) -> None:
    """Also what a clone holds that was made under it, or the installation of before; nothing that is not ours."""
    home = tmp_path / "carried" / "lib" / "phos"
    (home / "wheels").mkdir(parents=True)
    (home / "bin").mkdir()
    (home / "bin" / "layout.sh").touch()
    shutil.copy(ROOT / "install.sh", home)
    words = [home / "install.sh", "--offline", "--prefix", tmp_path / "new", "--python", "/bin/false"]
    done = subprocess.run(words, capture_output=True, text=True, check=False, umask=0o077)
    assert "/bin/false is not CPython" in done.stderr
    assert (tmp_path / "new" / "lib" / "phos").stat().st_mode & 0o777 == 0o755

    home = tmp_path / "home"
    (home / "displaced").mkdir(parents=True)
    (tmp_path / "elsewhere").touch()
    (home / "link").symlink_to(tmp_path / "elsewhere")
    for name, mode in (("phosd", 0o700), ("file", 0o600), ("displaced/criu", 0o700), ("../elsewhere", 0o600)):
        (home / name).touch()
        (home / name).chmod(mode)
    home.chmod(0o700)
    (function,) = re.findall(r"^let_everybody_read\(\) \{.*?^\}$", (ROOT / "install.sh").read_text(), re.M | re.S)
    subprocess.run(["bash", "-c", f"{function}; let_everybody_read"], env={**os.environ, "home": str(home)}, check=True)
    modes = [path.stat().st_mode & 0o777 for path in (home, home / "phosd", home / "file")]
    assert modes == [0o755, 0o755, 0o644]
    modes = [path.stat().st_mode & 0o777 for path in (home / "displaced" / "criu", tmp_path / "elsewhere")]
    assert modes == [0o700, 0o600]


def test_what_only_root_can_come_to_is_not_for_everybody(tmp_path: Path) -> None:
    (function,) = re.findall(r"^open_to_others\(\) \{.*?^\}$", (ROOT / "install.sh").read_text(), re.M | re.S)

    def is_open(program: Path) -> bool:
        return not subprocess.run(["bash", "-c", f"{function}; open_to_others {program}"], check=False).returncode

    assert is_open(Path("/usr/bin/env").resolve())
    tmp_path.chmod(0o700)
    (tmp_path / "python").touch(0o755)
    assert not is_open(tmp_path / "python")


@pytest.mark.parametrize("option", ["--check", "--uninstall"])
def test_a_prefix_that_is_not_there_is_not_made(option: str, tmp_path: Path) -> None:
    words = [ROOT / "install.sh", "--prefix", tmp_path / "mistyped", option]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "there is no folder" in done.stderr
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="there is no systemd here")
@pytest.mark.parametrize("folder", ["plain", "with a blank", "50%", "a&b|c"])
def test_the_unit_names_phosd_wherever_it_is(folder: str, tmp_path: Path) -> None:
    home = tmp_path / folder
    (home / "bin").mkdir(parents=True)
    (home / "bin" / "phosd").write_text("#!/bin/sh\n")
    (home / "bin" / "phosd").chmod(0o755)
    functions = re.findall(r"^unit_\w+\(\) \{ .* \}$", (ROOT / "install.sh").read_text(), re.M)
    environment = {**os.environ, "home": str(home), "source": str(ROOT)}
    words = ["bash", "-c", "\n".join([*functions, "unit_text"])]
    unit = subprocess.run(words, env=environment, capture_output=True, text=True, check=True).stdout
    (tmp_path / "phosd.service").write_text(unit)
    verify = ["systemd-analyze", "verify", "--man=no", tmp_path / "phosd.service"]
    done = subprocess.run(verify, capture_output=True, text=True, check=False)
    assert "phosd" not in done.stdout + done.stderr


def test_the_wheel_holds_every_module_and_nothing_else(tmp_path: Path) -> None:
    if importlib.util.find_spec("setuptools") is None and importlib.util.find_spec("pip") is None:
        pytest.fail("neither setuptools nor pip is there to build a wheel with")
    clone = tmp_path / "clone"
    clone.mkdir()
    for folder in ("phos", "cli", "gpu_engine", "images"):
        shutil.copytree(ROOT / folder, clone / folder, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.copy(ROOT / "pyproject.toml", clone)
    (clone / "README.md").write_text("PhOS\n")
    build = [sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "--wheel-dir", str(tmp_path), str(clone)]
    subprocess.run(build, check=True, stdin=subprocess.DEVNULL)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = {name for name in archive.namelist() if ".dist-info/" not in name}
    wanted = {f"phos/{path.relative_to(clone / 'phos')}" for path in (clone / "phos").rglob("*.py")}
    for folder in ("cli", "gpu_engine", "images"):  # behind links, which rglob does not follow
        wanted |= {f"phos/{path.relative_to(clone)}" for path in (clone / folder).rglob("*.py")}
    assert wanted <= held
    assert {
        name
        for name in held - wanted
        if not name.endswith((".cu", ".def", ".h", ".json", ".ptx", ".pyi", ".txt", "py.typed"))
    } == set()


def test_a_schema_becomes_the_same_messages_as_protoc_makes(tmp_path: Path) -> None:
    protoc = shutil.which("protoc")
    if protoc is None:
        pytest.skip("protoc is not installed")
    proto = tmp_path / "sample.proto"
    proto.write_text(
        'syntax = "proto3"; package sample; enum Kind { NONE = 0; SOME = 1; }\n'
        "message Outer { message Inner { repeated uint64 sizes = 1; } Inner inner = 1; Kind kind = 2;"
        " oneof one { string a = 3; bytes b = 4; } }"
    )
    subprocess.run([protoc, f"--proto_path={tmp_path}", f"--descriptor_set_out={tmp_path}/set", proto], check=True)
    assert packaging_script("gen_python").main(["", f"{tmp_path}/set", f"{tmp_path}/made/sample_pb2.py"]) == 0
    check = (
        "import sample_pb2 as s; m = s.Outer(kind=s.SOME, b=b'x'); m.inner.sizes.extend([1, 300]);"
        "data = m.SerializeToString(); assert data == bytes.fromhex('0a050a0301ac0210012201') + b'x', data.hex();"
        "assert s.Outer.FromString(data) == m and s.Kind.Name(1) == 'SOME' and s.Outer.Inner().sizes == []"
    )
    subprocess.run([sys.executable, "-c", check], cwd=tmp_path / "made", check=True)


def test_two_schemas_at_once_are_refused(tmp_path: Path) -> None:
    gen_python = packaging_script("gen_python")
    one = b"\x0a\x08\x0a\x06a.prot"
    assert gen_python.single_file(one) == one[2:]
    with pytest.raises(ValueError, match="several"):
        gen_python.single_file(one + one)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("a-1-py3-none-any.whl", True),
        ("a-1-py2.py3-none-any.whl", True),
        ("a-1-cp3{minor}-cp3{minor}-manylinux_2_17_x86_64.whl", True),
        ("a-1-cp3{minor}-cp3{minor}t-manylinux_2_17_x86_64.whl", False),
        ("a-1-cp39-abi3-manylinux2014_x86_64.whl", True),
        ("a-1-cp399-abi3-manylinux2014_x86_64.whl", False),
        ("a-1-cp39-cp39-manylinux2014_x86_64.whl", False),
        ("a-1-py2-none-any.whl", False),
    ],
)
def test_wheels_are_chosen_by_their_names(name: str, expected: bool) -> None:
    fits = packaging_script("unpack_wheels").fits
    assert fits(Path(name.format(minor=sys.version_info.minor))) is expected


@pytest.mark.parametrize(
    ("said", "remedy"),
    [
        (
            "Error (criu/kerndat.c:1082): Fail to make dir /tmp/.criu.move_mount_set_group.x: Read-only file system",
            "/tmp",
        ),
        ("Error (criu/cr-check.c:2): Operation not permitted", "--privileged"),
    ],
)
def test_what_criu_lacks_is_what_the_doctor_says(monkeypatch: pytest.MonkeyPatch, said: str, remedy: str) -> None:
    answers = {"--version": (0, "Version: 4.1.1"), "check": (1, said)}
    monkeypatch.setattr(probes, "_run", lambda *words: answers.get(words[1], (0, "")))
    (check,) = [finding for finding in probes.criu() if finding.name == "criu check"]
    assert remedy in check.remedy


def finding(name: str, state: str) -> probes.Finding:
    return probes.Finding(name, state, "as found", "do this" if state != "ok" else "")


@pytest.mark.parametrize(("states", "status"), [(["ok"], 0), (["ok", "warning"], 0), (["ok", "missing", "warning"], 1)])
def test_doctor_says_all_and_fails_only_for_what_is_needed(
    monkeypatch: pytest.MonkeyPatch, states: list[str], status: int
) -> None:
    findings = [finding(f"thing {number}", state) for number, state in enumerate(states)]
    monkeypatch.setattr(doctor, "GROUPS", (("things", lambda: iter(findings)),))
    plain = CliRunner().invoke(doctor.doctor, [])
    assert plain.exit_code == status
    for one in findings:
        assert f"{one.name}: as found" in plain.output
    assert plain.output.count("do this") == len(states) - states.count("ok")
    answer = json.loads(CliRunner().invoke(doctor.doctor, ["--json"]).output)
    assert answer["ok"] is (status == 0)
    assert [entry["state"] for entry in answer["findings"]] == states


def test_doctor_survives_a_probe_that_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken() -> None:
        raise OSError("no such thing")

    monkeypatch.setattr(doctor, "GROUPS", (("broken", broken), ("fine", lambda: iter([finding("fine", "ok")]))))
    result = CliRunner().invoke(doctor.doctor, [])
    assert result.exit_code == 0
    assert "no such thing" in result.output
    assert "fine: as found" in result.output


@pytest.mark.parametrize(("asked", "limit", "state"), [(None, 256 << 20, "ok"), ("1073741824", 256 << 20, "warning")])
def test_memlock_is_compared_with_the_ring(
    monkeypatch: pytest.MonkeyPatch, asked: str | None, limit: int, state: str
) -> None:
    monkeypatch.delenv("PHOS_RING_BYTES", raising=False)
    if asked:
        monkeypatch.setenv("PHOS_RING_BYTES", asked)
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(probes.resource, "getrlimit", lambda _kind: (limit, limit))
    assert next(row for row in probes.limits() if row.name == "memlock").state == state


def test_probes_agree_with_this_machine() -> None:
    rows = {row.name: row for row in [*probes.kernel(), *probes.permissions(), *probes.limits()]}
    assert rows["kernel"].found == os.uname().release
    assert all(row.state in ("ok", "warning", "missing") and row.found for row in rows.values())
    assert all(row.remedy for row in rows.values() if row.state != "ok")
    if os.geteuid() == 0:
        assert rows["userfaultfd"].state == "ok"


@pytest.mark.parametrize(
    ("mounts", "state"),
    [
        ("tmpfs /run tmpfs rw 0 0\n", "ok"),
        ("overlay / overlay rw 0 0\ntmpfs /run/lock tmpfs rw 0 0\n", "warning"),
        ("tmpfs /run tmpfs rw 0 0\n/dev/vda /run ext4 rw 0 0\n", "warning"),
        ("", "warning"),
    ],
)
def test_the_doctor_sees_whether_criu_can_keep_its_cache(
    mounts: str, state: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(probes, "_read", lambda path: mounts if path == "/proc/mounts" else "")
    assert probes.criu_cache().state == state


def plugin_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> probes.Finding:
    monkeypatch.setenv("PHOS_HOME", str(tmp_path))
    return probes.plugin()


def test_a_plugin_folder_must_hold_our_plugin_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert plugin_row(tmp_path, monkeypatch).state == "missing"
    plugin = tmp_path / "plugin" / "phos_plugin.so"
    plugin.parent.mkdir()
    plugin.write_bytes(b"no library")
    assert plugin_row(tmp_path, monkeypatch).state == "missing"
    source = tmp_path / "plugin.c"
    source.write_text("int CR_PLUGIN_DESC;\n")
    subprocess.run(["gcc", "-shared", "-fPIC", "-o", plugin, source], check=True)
    assert plugin_row(tmp_path, monkeypatch).state == "ok"
    (plugin.parent / "other_plugin.so").touch()
    assert plugin_row(tmp_path, monkeypatch).state == "warning"

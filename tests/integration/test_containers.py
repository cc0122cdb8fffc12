"""Containers: what the real runc does with programs under PhOS, and a phosd that is outside of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest

from phos.gpu_engine.installation import launcher, plugin_folder
from tests.integration.site import PATIENCE, Site, end_file, example_words, wait_until
from tests.integration.test_cow import inventory
from tests.unit.image_sets import skip

REPOSITORY = Path(__file__).resolve().parents[2]

OURS = sorted({Path(sys.prefix), Path(sys.base_prefix), launcher("criu").resolve().parents[1], REPOSITORY})
"""What runs in a container, and is wherever it was put."""

CAPABILITIES = {6: "SETGID", 7: "SETUID", 12: "NET_ADMIN", 19: "SYS_PTRACE", 21: "SYS_ADMIN", 25: "SYS_TIME"}
"""By their numbers (linux/capability.h); of the programs in the container, and of CRIU where it runs in it."""

SYSTEM = ("bin", "etc", "lib", "lib64", "sbin", "usr")
"""What a container has of the machine's, and cannot write to."""

SEALED = """
set -eu
site=$1
exec 5</tmp
mount -t tmpfs tmpfs /tmp
mkdir /tmp/.machine
mount --no-canonicalize --bind /proc/self/fd/5 /tmp/.machine
exec 5<&-
while [ "$1" != -- ]; do
    mkdir -p "$1"
    case $1 in /tmp/*) mount --bind "/tmp/.machine${1#/tmp}" "$1" ;; *) mount --bind "$1" "$1" ;; esac
    last=$1
    shift
done
shift
umount --lazy /tmp/.machine
cd "$PWD"
while read -r _ _ _ _ place _ rest; do
    case ${rest##*- } in proc* | sysfs* | cgroup* | dev* | mqueue* | tmpfs*) continue ;; esac
    case $place in "$site" | /tmp) ;; *) mount -o remount,bind,ro "$place" ;; esac
done </proc/self/mountinfo
for place in / "$last"; do
    [ ! -w "$place" ] || { echo "$place could be written to" >&2; exit 1; }
done
exec "$@"
"""
"""Every runc has a mount namespace of its own, in which nothing of the machine's can be written to but the site.

To restore, runc mounts what the container is to have a second time, and not read-only, in the place of its root. What
is left of that, if two do so at once or something fails, is removed later, and with it whatever is mounted there.
"""


def sealed(site: Site) -> list[str]:
    """How a command begins that can write to nothing but the site."""
    return ["unshare", "--mount", "sh", "-c", SEALED, "sh", str(site.folder), *map(str, OURS), "--"]


@dataclass
class Container:
    """One of runc's, whose first process is an example, which appends its output to a file on the site."""

    site: Site
    name: str
    bundle: Path
    output: Path

    def runc(self, *words: str, check: bool = True, **changes: str) -> subprocess.CompletedProcess[str]:
        """A command of runc's; its containers are the site's own."""
        output = self.bundle / "runc.out"  # not a pipe: what stays in the container would hold it
        with open(output, "w", encoding="utf-8") as file:
            done = subprocess.run(
                [
                    *sealed(self.site),
                    "runc",
                    "--root",
                    str(self.site.folder / "runc"),
                    "--criu",
                    str(launcher("criu")),
                    *words,
                ],
                cwd=self.bundle,
                env={**self.site.environment, **changes},
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                timeout=PATIENCE,
                check=False,
            )
        result = subprocess.CompletedProcess[str](done.args, done.returncode, output.read_text(errors="replace"))
        if check:
            assert result.returncode == 0, f"{result.stdout}\n{self.log()}"
        return result

    def checkpoint(self, image: Path, *options: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """``runc checkpoint``; CRIU's log is in the bundle."""
        return self.runc(
            "checkpoint", "--image-path", str(image), "--work-path", str(self.bundle), *options, self.name, check=check
        )

    def restore(self, image: Path) -> None:
        """``runc restore -d``."""
        self.runc("restore", "-d", "--image-path", str(image), "--work-path", str(self.bundle), self.name)

    def log(self) -> str:
        """The error lines of CRIU's last log."""
        return self.site.errors(self.bundle / "criu.log")

    def lines(self) -> list[str]:
        return self.output.read_text(errors="replace").splitlines() if self.output.exists() else []

    def wait_iterations(self, wanted: int) -> None:
        def computes() -> bool:
            assert json.loads(self.runc("state", self.name).stdout)["status"] == "running", self.lines()
            return sum(line.startswith("ITERATION") for line in self.lines()) >= wanted

        wait_until(computes, f"iteration {wanted} in the container")

    def result(self) -> str:
        """Let it come to its end, and return its result."""
        end_file(self.output).touch()
        wait_until(lambda: any(line.startswith("RESULT") for line in self.lines()), "the container's result")
        return next(line.split()[1] for line in self.lines() if line.startswith("RESULT"))


def bind(path: Path, *options: str) -> dict[str, object]:
    return {"destination": str(path), "type": "bind", "source": str(path), "options": ["bind", *options]}


def tmpfs(path: str) -> dict[str, object]:
    return {"destination": path, "type": "tmpfs", "source": "tmpfs", "options": ["nosuid"]}


def configuration(site: Site, bundle: Path, output: Path, options: Path) -> dict[str, object]:
    """The system's files, read only, in namespaces of its own; of the site's everything can be written to."""
    root = bundle / "rootfs"
    root.mkdir(parents=True)
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}, tmpfs("/dev"), tmpfs("/dev/shm")]
    mounts += [tmpfs("/tmp"), tmpfs("/run")]
    for entry in map(Path("/").joinpath, SYSTEM):
        if entry.is_symlink():
            (root / entry.name).symlink_to(os.readlink(entry))
        elif entry.is_dir():
            mounts.append(bind(entry, "ro"))
    mounts += [bind(path, "ro") for path in OURS]
    mounts.append(bind(site.folder))
    words = [str(launcher("phos-gpu")), "run", "--", *example_words("mlp"), "--until", str(end_file(output))]
    held = int(next(line for line in Path("/proc/self/status").read_text().splitlines() if "CapEff" in line)[7:], 16)
    capabilities = [f"CAP_{name}" for number, name in CAPABILITIES.items() if held >> number & 1]
    return {
        "ociVersion": "1.0.2",
        "annotations": {"org.criu.config": str(options)},
        "process": {
            "user": {"uid": 0, "gid": 0},
            "cwd": str(site.folder),
            "args": ["/bin/sh", "-c", f'exec "$@" </dev/null >>{output} 2>&1', "sh", *words],
            "env": [f"{name}={value}" for name, value in site.environment.items()],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
    }


def made(site: Site, number: int) -> Container:
    """One that has not been started, with a root of its own: each runc mounts into it."""
    bundle = site.folder / f"bundle-{number}"
    container = Container(site, f"phos-test-{os.getpid()}-{number}", bundle, site.folder / "container.log")
    options = site.folder / "criu.conf"
    options.write_text(f"libdir {plugin_folder()}\nlog-file criu.log\nverbosity 4\n")
    words = configuration(site, bundle, container.output, options)
    (bundle / "config.json").write_text(json.dumps(words))
    return container


@pytest.fixture
def container(site: Site) -> Iterator[Container]:
    """One that runs and computes, with phosd outside of it."""
    if shutil.which("runc") is None:
        skip("there is no runc")
    first = made(site, 0)
    site.run("phosd", "--ensure")
    try:
        started = first.runc("run", "-d", first.name, check=False)
        if started.returncode != 0:
            skip(f"runc starts no container here: {started.stdout}")
        first.wait_iterations(3)
        yield first
    finally:
        first.runc("delete", "--force", first.name, check=False)


def test_what_runc_mounts_cannot_be_written_to(site: Site) -> None:
    """Nor removed then: not where it is mounted anew, by itself or with the root that it is in."""
    place, mark = site.folder / "place", f"phos-test-{os.getpid()}"
    place.mkdir()
    write = (
        f'mount --bind "$1" "$2" && ! touch "$2/{mark}" && mount --rbind / "$2" && ! touch "$2$1/{mark}" && touch ours'
    )
    done = subprocess.run(
        [*sealed(site), "sh", "-c", write, "sh", str(REPOSITORY), str(place)],
        cwd=site.folder,
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stderr.count("Read-only file system")) == (0, 2), done.stderr
    assert (site.folder / "ours").exists()


def test_a_container_runs_on_and_comes_back(container: Container) -> None:
    site = container.site
    first, second = site.folder / "first", site.folder / "second"
    container.checkpoint(first, "--leave-running")
    assert inventory(site, first)["protocol"] == "cow"
    container.checkpoint(second)
    assert inventory(site, second)["protocol"] == "stop"
    for image in (first, second):
        site.run("phos-gpu", "verify", str(image))
    wait_until(lambda: not site.status()["processes"], "the end of the container")
    container.restore(second)
    assert container.result() == site.reference("mlp")


def test_runc_is_answered_when_the_image_is_whole(container: Container) -> None:
    container.site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="slow commit")
    image = container.site.folder / "image"
    container.checkpoint(image, "--leave-running")
    assert inventory(container.site, image)["protocol"] == "cow"
    assert container.result() == container.site.reference("mlp")


def test_runc_is_told_that_an_image_will_never_be_whole(container: Container) -> None:
    container.site.serve("tests.integration.altered_phosd", ALTERED_PHOSD="full at the commit")
    image = container.site.folder / "image"
    failed = container.checkpoint(image, "--leave-running", check=False)
    assert failed.returncode != 0
    assert "the image is not whole" in container.log()
    assert not list(image.glob("phos-*"))
    assert container.result() == container.site.reference("mlp")


def test_a_container_is_not_checkpointed_without_phosd(container: Container) -> None:
    container.site.stop_phosd()
    failed = container.checkpoint(container.site.folder / "image", check=False)
    assert failed.returncode != 0
    assert "start it with 'phosd --ensure'" in container.log()
    container.site.run("phosd", "--ensure")
    assert container.result() == container.site.reference("mlp")


def test_containers_of_one_image_beside_each_other(container: Container) -> None:
    """Each has pids and a session of its own: the one that was dumped computes on, and two of its image with it."""
    site, image = container.site, container.site.folder / "image"
    others = [made(site, number) for number in (1, 2)]
    container.checkpoint(image, "--leave-running")
    try:
        with ThreadPoolExecutor() as both:
            list(both.map(lambda other: other.restore(image), others))
        wait_until(lambda: len(site.status()["processes"]) == 3, "all to be known to phosd")
        known = site.status()["processes"]
        assert len({process["session"] for process in known}) == 3
        assert {process["state"] for process in known} == {"running"}
        expected = site.reference("mlp")
        assert container.result() == expected
        wait_until(lambda: not site.status()["processes"], "the end of all")
        results = [line.split()[1] for line in container.lines() if line.startswith("RESULT")]
        assert results == [expected] * 3
        site.wait_no_gpu_memory()
    finally:
        for other in others:
            other.runc("delete", "--force", other.name, check=False)

"""Containers: what the real runc does with programs under PhOS, and a phosd that is outside of them."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from phos.gpu_engine.installation import launcher, plugin_folder
from tests.integration.site import PATIENCE, Site, end_file, example_words, wait_until
from tests.integration.test_cow import inventory
from tests.unit.image_sets import skip

REPOSITORY = Path(__file__).resolve().parents[2]

CAPABILITIES = {6: "SETGID", 7: "SETUID", 12: "NET_ADMIN", 19: "SYS_PTRACE", 21: "SYS_ADMIN", 25: "SYS_TIME"}
"""By their numbers (linux/capability.h); of the programs in the container, and of CRIU where it runs in it."""

OWN = {"proc", "dev", "sys", "tmp", "run"}
"""What a container has of its own of the root's folders."""


@dataclass
class Container:
    """One of runc's, whose first process is an example, with its output on the site."""

    site: Site
    name: str
    bundle: Path
    output: Path

    def runc(self, *words: str, check: bool = True, **changes: str) -> subprocess.CompletedProcess[str]:
        """A command of runc's; its containers are the site's own."""
        output = self.bundle / "runc.out"  # not a pipe: what stays in the container would hold it
        with open(output, "w", encoding="utf-8") as file:
            done = subprocess.run(
                ["runc", "--root", str(self.site.folder / "runc"), "--criu", str(launcher("criu")), *words],
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
    """The machine's files, read only, in namespaces of its own; of the site's everything can be written to."""
    root = bundle / "rootfs"
    mounts = [{"destination": "/proc", "type": "proc", "source": "proc"}, tmpfs("/dev"), tmpfs("/dev/shm")]
    mounts += [tmpfs("/tmp"), tmpfs("/run")]
    for entry in sorted(Path("/").iterdir()):
        if entry.is_symlink():
            (root / entry.name).symlink_to(os.readlink(entry))
        elif entry.is_dir():
            (root / entry.name).mkdir()
            mounts += [] if entry.name in OWN else [bind(entry, "ro")]
    ours = {REPOSITORY, launcher("criu").resolve().parents[1], Path(sys.prefix), Path(sys.base_prefix)}
    mounts += [bind(path, "ro") for path in sorted(ours)]
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
            "args": ["/bin/sh", "-c", f'exec "$@" </dev/null >{output} 2>&1', "sh", *words],
            "env": [f"{name}={value}" for name, value in site.environment.items()],
            "capabilities": dict.fromkeys(("bounding", "effective", "permitted"), capabilities),
        },
        "root": {"path": str(root), "readonly": True},
        "mounts": mounts,
        "linux": {"namespaces": [{"type": kind} for kind in ("pid", "ipc", "uts", "mount")]},
    }


@pytest.fixture
def container(site: Site) -> Iterator[Container]:
    """One that runs and computes, with phosd outside of it."""
    if shutil.which("runc") is None:
        skip("there is no runc")
    bundle = site.folder / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    made = Container(site, f"phos-test-{os.getpid()}-{site.folder.name}", bundle, site.folder / "container.log")
    options = site.folder / "criu.conf"
    options.write_text(f"libdir {plugin_folder()}\nlog-file criu.log\nverbosity 4\n")
    (bundle / "config.json").write_text(json.dumps(configuration(site, bundle, made.output, options)))
    site.run("phosd", "--ensure")
    try:
        started = made.runc("run", "-d", made.name, check=False)
        if started.returncode != 0:
            skip(f"runc starts no container here: {started.stdout}")
        made.wait_iterations(3)
        yield made
    finally:
        made.runc("delete", "--force", made.name, check=False)


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

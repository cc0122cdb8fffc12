"""Images of another host's phosd: a second phosd with a socket of its own, to which nothing leads but TCP."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from phos.gpu_engine.installation import launcher
from tests.integration.dumped import LAYERS_SUM, Dumped
from tests.integration.site import Site, wait_until
from tests.integration.test_lazy import restores

MODES = ["eager", "lazy"]


class Other:
    """The other host. Its images are in `shared`; `address` leads there."""

    def __init__(self, site: Site) -> None:
        folder = site.folder / "other"
        folder.mkdir()
        self.site = Site(folder)
        self.shared = folder / "shared"
        self.shared.mkdir()
        self.key = folder / "key"
        self.key.write_bytes(os.urandom(32))
        self.key.chmod(0o600)
        # Nobody else gets this port as long as it is bound; phosd does, as nobody listens here.
        self.port = socket.socket()
        self.port.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.port.bind(("127.0.0.1", 0))
        self.address = f"127.0.0.1:{self.port.getsockname()[1]}"
        self.site.environment |= {
            "PHOS_LISTEN": self.address,
            "PHOS_SHARE": str(self.shared),
            "PHOS_REMOTE_KEY": str(self.key),
            "SOFTGPU_COPY_BANDWIDTH": "0",
        }
        # This host has a copy of the secret.
        here = site.folder / "here.key"
        shutil.copy2(self.key, here)
        site.environment["PHOS_REMOTE_KEY"] = str(here)

    def start(self) -> None:
        self.site.run("phosd", "--ensure")
        wait_until(lambda: self.site.status()["listen"] == self.address, "the other phosd to listen")

    def take(self, dumped: Dumped, name: str = "image") -> str:
        """Move an image there; its address."""
        there = self.shared / name
        shutil.move(dumped.image, there)
        return f"tcp://{self.address}/{name}"


@pytest.fixture
def other(site: Site) -> Iterator[Other]:
    made = Other(site)
    try:
        yield made
    finally:
        made.site.close()
        made.port.close()


def restore(dumped: Dumped, address: str, *options: str, check: bool = True) -> dict[str, Any] | str:
    """`phos-gpu restore`: what it says, or its errors."""
    wait_until(lambda: not dumped.program.alive(), "the pid to be free")
    dumped.program.output.write_bytes(dumped.output)
    scratch = dumped.site.folder / "scratch"
    scratch.mkdir(exist_ok=True)
    done = dumped.site.run(
        "phos-gpu", "restore", "--json", *options, address, check=check, TMPDIR=str(scratch), PYTHONWARNINGS="error"
    )
    if done.returncode == 0:
        assert list(scratch.iterdir()) == []
        said: dict[str, Any] = json.loads(done.stdout)
        return said
    left = [file.name for folder in scratch.iterdir() for file in folder.iterdir()]
    assert all(name.endswith(".log") for name in left)
    shutil.rmtree(scratch)
    return done.stdout + done.stderr


@pytest.mark.parametrize("pin", [False, True])
def test_an_image_of_another_host_is_restored(site: Site, other: Other, pin: bool) -> None:
    dumped = Dumped(site, site.folder)
    address = other.take(dumped)
    other.start()
    if pin:
        image = other.shared / "image"
        other.site.run("phos-gpu", "image", "pin", "--copy", "--name", "layers", str(image))
        for file in image.glob("phos-data-*.raw"):
            file.unlink()
        address = address.replace("/image", "/layers")
    for options in ([], ["--lazy"]):
        said = restore(dumped, address, *options)
        assert isinstance(said, dict)
        assert said["image"] == address
        assert dumped.program.wait_result() == LAYERS_SUM
    modes = [(job["mode"], job["state"]) for job in site.status()["jobs"] if job["kind"] == "restore"]
    assert modes == [("eager", "attached"), ("lazy", "attached")]
    assert restore(dumped, f"tcp://{other.address}/{other.shared}/image")  # by its path there
    assert dumped.program.wait_result() == LAYERS_SUM
    if pin:
        wait_until(lambda: other.site.status()["pinned"][0]["users"] == 0, "the connections to end")


def test_what_the_other_host_refuses(site: Site, other: Other) -> None:
    dumped = Dumped(site, site.folder)
    address = other.take(dumped)
    assert "cannot be reached: Connection refused" in str(restore(dumped, address, check=False))
    other.start()
    shutil.copytree(other.shared / "image", site.folder / "secret")
    (other.shared / "link").symlink_to(site.folder / "secret")
    for name in (
        "nothing",
        "../key",
        "../../secret",
        "link",
        f"/{site.folder}/secret",
        f"/{other.shared}/../../secret",
    ):
        assert "phosd there shares no image" in str(restore(dumped, f"tcp://{other.address}/{name}", check=False))
    (other.shared / "image" / "phos-commit.img").rename(other.shared / "commit")
    assert "is incomplete" in str(restore(dumped, address, check=False))
    (other.shared / "commit").rename(other.shared / "image" / "phos-commit.img")
    key = Path(site.environment["PHOS_REMOTE_KEY"])
    right = key.read_bytes()
    key.write_bytes(os.urandom(32))
    assert "that is not the shared secret" in str(restore(dumped, address, check=False))
    key.write_bytes(right)
    key.chmod(0o644)
    assert "Others may read or change the key file" in str(restore(dumped, address, check=False))
    key.unlink()
    assert "cannot be read (No such file or directory). Make one with" in str(restore(dumped, address, check=False))
    assert "is no address of an image" in str(restore(dumped, "tcp://127.0.0.1/x", check=False))
    key.write_bytes(right)
    key.chmod(0o600)
    restore(dumped, address)
    assert dumped.program.wait_result() == LAYERS_SUM


def damage(file: Path) -> None:
    with open(file, "r+b") as data:
        byte = data.read(1)
        data.seek(0)
        data.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("mode", MODES)
def test_what_is_damaged_there_is_noticed_here(site: Site, other: Other, mode: str) -> None:
    dumped = Dumped(site, site.folder)
    address = other.take(dumped)
    other.start()
    options = ["--lazy"] if mode == "lazy" else []
    for pattern in ("phos-data-*.raw", "pages-1.img", "phos-chunks.img"):
        file = next(f for f in sorted((other.shared / "image").glob(pattern)) if f.stat().st_size)
        damage(file)
        assert "damaged" in str(restore(dumped, address, *options, check=False)), pattern
        damage(file)
    restore(dumped, address, *options)
    assert dumped.program.wait_result() == LAYERS_SUM


def test_phosd_need_not_see_the_folder_that_stands_for_an_image(site: Site, other: Other) -> None:
    """CRIU's mounts are others than phosd's: in a container, or where one of them has a /tmp of its own."""
    dumped = Dumped(site, site.folder)
    address = other.take(dumped)
    other.start()
    wait_until(lambda: not dumped.program.alive(), "the pid to be free")
    dumped.program.output.write_bytes(dumped.output)
    apart = site.folder / "apart"
    apart.mkdir()
    command = f"mount -t tmpfs tmpfs {apart} && exec {launcher('phos-gpu')} restore {address}"
    done = subprocess.run(
        ["unshare", "--mount", "sh", "-c", command],
        env={**site.environment, "TMPDIR": str(apart)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert dumped.program.wait_result() == LAYERS_SUM


@pytest.mark.parametrize("mode", MODES)
def test_the_other_phosd_dies_in_the_middle(site: Site, other: Other, mode: str) -> None:
    dumped = Dumped(site, site.folder)
    dumped.go.unlink()
    address = other.take(dumped)
    other.start()
    site.stop_phosd()
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = str(10 << 20)
    scratch = site.folder / "scratch"
    scratch.mkdir()
    words = ["phos-gpu", "restore", *(["--lazy"] if mode == "lazy" else []), address]
    going = site.background(*words, TMPDIR=str(scratch))

    def loading() -> bool:
        return any(job["bytes_done"] for job in restores(site))

    wait_until(loading, "data to come")
    os.kill(other.site.daemon_pid(), signal.SIGKILL)
    assert going.wait() != 0
    wait_until(lambda: not dumped.program.alive(), "the end of the program")
    job = next(job for job in site.status()["jobs"] if job["kind"] == "restore")
    assert job["state"] == "failed"
    # Refused when nobody listens any more, reset where the other one died with a connection that it had not taken yet,
    # closed where it had and was about to ask for the secret.
    said = (
        "the connection was lost",
        "cannot be reached: Connection refused",
        "cannot be reached: Connection reset by peer",
        "cannot be reached: the other side has closed the connection",
    )
    assert any(words in job["error"] for words in said), job["error"]
    shutil.rmtree(scratch)
    # And once it is back:
    other.start()
    dumped.go.touch()
    site.stop_phosd()
    site.environment["SOFTGPU_COPY_BANDWIDTH"] = "0"
    restore(dumped, address)
    assert dumped.program.wait_result() == LAYERS_SUM


def test_a_phosd_that_would_share_without_a_secret_does_not_start(site: Site, other: Other) -> None:
    for changes, sentence in (
        ({"PHOS_LISTEN": "7070"}, "PHOS_LISTEN=7070 is no address"),
        ({"PHOS_SHARE": ""}, "PHOS_SHARE names no folder"),
        ({"PHOS_SHARE": "/"}, "/ cannot be shared"),
        ({"PHOS_REMOTE_KEY": str(site.folder / "none")}, "Images are not shared without a secret. The key file"),
    ):
        done = other.site.run("phosd", "--ensure", check=False, **changes)
        assert done.returncode != 0
        assert sentence in done.stderr


def test_the_configuration_file_says_it_as_well(site: Site, other: Other) -> None:
    text = f'listen = "{other.address}"\nshare = "{other.shared}"\nremote-key = "{other.key}"\npin-limit = "12M"\n'
    (other.site.folder / "phos.toml").write_text(text)
    for name in ("PHOS_LISTEN", "PHOS_SHARE", "PHOS_REMOTE_KEY"):
        del other.site.environment[name]
    other.site.environment["PHOS_CONFIG"] = str(other.site.folder / "phos.toml")
    other.start()
    assert other.site.status()["pin_limit"] == 12 << 20
    assert f"Images are shared at {other.address}." in other.site.run("phos-gpu", "status").stdout


def test_phosd_serves_its_own_host_while_its_address_is_taken(site: Site, other: Other) -> None:
    host, _, port = other.address.rpartition(":")
    with socket.create_server((host, int(port))):
        other.site.run("phosd", "--ensure")
        assert other.site.status()["listen"] == ""
    wait_until(lambda: other.site.status()["listen"] == other.address, "the other phosd to listen")


def test_a_directory_that_stands_for_an_image_is_restored_and_pinned_like_any_other(site: Site, other: Other) -> None:
    dumped = Dumped(site, site.folder)
    address = other.take(dumped)
    other.start()
    refused = site.run("phos-gpu", "image", "fetch", address + "s", str(dumped.image), check=False)
    assert refused.returncode == 1
    assert "phosd there shares no image" in refused.stderr
    assert not dumped.image.exists()
    said = json.loads(site.run("phos-gpu", "image", "fetch", "--json", address, str(dumped.image)).stdout)
    assert said["address"] == address
    assert not dumped.data() or sum(file.stat().st_blocks for file in dumped.data()) == 0
    for mode in MODES:
        assert dumped.restore(mode) == LAYERS_SUM
    site.run("phos-gpu", "image", "pin", str(dumped.image))
    other.site.stop_phosd()
    for mode in MODES:
        assert dumped.restore(mode) == LAYERS_SUM
    site.run("phos-gpu", "image", "unpin", str(dumped.image))
    assert "cannot be reached: Connection refused" in dumped.restore(check=False)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("command", ["restore", "fetch"])
def test_nothing_is_left_of_what_was_copied_before_an_interruption(
    site: Site, other: Other, command: str, number: signal.Signals
) -> None:
    other.start()
    phosd, address = other.site.daemon_pid(), f"tcp://{other.address}/image"
    temporary, into = site.folder / "temporary", site.folder / "into"
    temporary.mkdir()
    words = ["restore", address] if command == "restore" else ["image", "fetch", address, str(into)]
    os.kill(phosd, signal.SIGSTOP)
    try:
        begun = site.background("phos-gpu", *words, TMPDIR=str(temporary))
        # Python looks whether it can write there by a file of its own, before that.
        wait_until(lambda: into.exists() or any(temporary.glob("phos-remote-*")), "the folder")
        begun.send_signal(number)
        assert begun.wait() == 128 + number
    finally:
        os.kill(phosd, signal.SIGCONT)
    assert not into.exists()
    assert not list(temporary.iterdir())

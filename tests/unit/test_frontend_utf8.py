"""File names that are not UTF-8 must not keep a process from speaking to phosd."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.unit.frontend_fake import ROOT


@pytest.fixture(scope="module")
def mender(tmp_path_factory: pytest.TempPathFactory) -> Path:
    program = tmp_path_factory.mktemp("utf8") / "utf8_cases"
    flags = ["-std=gnu11", "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-fsanitize=address,undefined"]
    sources = [ROOT / "tests/unit/utf8_cases.c", ROOT / "frontend/utf8.c"]
    subprocess.run(["gcc", *flags, f"-I{ROOT / 'frontend'}", "-o", program, *sources], check=True)
    return program


def decodes(data: bytes) -> bool:
    try:
        data.decode()
    except UnicodeDecodeError:
        return False
    return True


# Pieces that come close to characters, and others.
PIECE = st.one_of(
    st.text(max_size=3).map(lambda text: text.encode(errors="replace")),
    st.binary(max_size=4),
    st.sampled_from([b"\xc0\x80", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"\xf0\x9f\x98", b"\xe2\x82"]),
)
NAME = st.lists(PIECE, max_size=6).map(lambda pieces: b"".join(pieces).replace(b"\n", b"").replace(b"\0", b""))


@pytest.mark.timeout(120)
@settings(max_examples=40)
@given(names=st.lists(NAME, min_size=1, max_size=60))
def test_what_is_not_utf8_is_replaced_and_the_rest_is_kept(mender: Path, names: list[bytes]) -> None:
    done = subprocess.run([mender], input=b"\n".join(names) + b"\n", capture_output=True, check=True)
    mended = done.stdout.split(b"\n")[:-1]
    assert len(mended) == len(names)
    for before, after in zip(names, mended, strict=True):
        assert len(after) == len(before)
        assert decodes(after)
        if decodes(before):
            assert after == before
        else:
            # Whatever Python finds well-formed is still there.
            assert after.replace(b"?", b"") == before.decode(errors="ignore").replace("?", "").encode()

"""What an ordinary user can do: tried in a child that has become one."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path

import pytest

NOBODY = 65534

needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")


def as_user(folder: Path, action: Callable[[], object], uid: int = NOBODY) -> str:
    """Do something as that user with ``folder`` as the working directory. Returns "" or the name of an errno."""
    read_end, write_end = os.pipe()
    child = os.fork()
    if child == 0:
        said = "an exception"
        try:
            os.chdir(folder)
            os.setgroups([])
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            action()
            said = ""
        except OSError as error:
            said = errno.errorcode.get(error.errno or 0, repr(error))
        finally:
            os.write(write_end, said.encode())
            os._exit(0)
    os.close(write_end)
    with open(read_end) as answer:
        said = answer.read()
    os.waitpid(child, 0)
    return said

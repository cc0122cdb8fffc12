"""What this machine is like, for tests of who brings a restored process's memory (packaging/criu, fills)."""

from __future__ import annotations

import os
import re
from pathlib import Path


def memory_is_filled() -> bool:
    """Whether the plugin's server may bring memory: userfaultfd(2) is allowed, and nobody gets huge pages unasked."""
    huge = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    seccomp = re.search(r"^Seccomp:\s*(\d)", Path("/proc/self/status").read_text(), re.MULTILINE)
    return (
        os.geteuid() == 0
        and Path("/proc/sys/vm/unprivileged_userfaultfd").exists()
        and seccomp is not None
        and seccomp[1] == "0"
        and not (huge.exists() and "[always]" in huge.read_text())
    )

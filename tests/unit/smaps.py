"""What the kernel says of a mapping of this process (proc_pid_smaps(5))."""

import re
from pathlib import Path


def mapped_huge(address: int) -> int:
    """How many bytes of the mapping at an address are mapped by huge pages of a tmpfs."""
    smaps = Path("/proc/self/smaps").read_text()
    (found,) = re.findall(rf"^{address:x}-.*?^ShmemPmdMapped:\s+(\d+) kB", smaps, re.MULTILINE | re.DOTALL)
    return int(found) << 10

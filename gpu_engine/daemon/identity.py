"""Who a session is, for its parts and for sentences about it.

The parts share this instead of the session itself: that would be a cycle of references, which keeps all that an ended
process has told until Python looks for garbage.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(slots=True)
class Identity:
    """A process under the frontend, as it is now: restored, it has another pid."""

    session: bytes
    pid: int
    uid: int
    executable: str = ""

"""How a checkpoint or a restore ends, in the words that phosd, the launcher and ``phos-gpu`` have for it.

What comes before that is the protocols' own (:data:`phos.gpu_engine.restore.base.UNDER_WAY`).
"""

from __future__ import annotations

SUCCEEDED = ("committed", "attached")
"""A checkpoint whose image is whole; a restore whose processes compute."""

MISPREDICTED = "mispredicted"
"""A guess was wrong, and it can be had in another way."""

FAILED = ("failed", MISPREDICTED)

FINAL = (*SUCCEEDED, *FAILED)

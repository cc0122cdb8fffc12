"""What a person may choose for every checkpoint, from phosd's environment."""

from __future__ import annotations

import os
from dataclasses import dataclass

from phos.gpu_engine.cow.settings import size_of
from phos.gpu_engine.errors import UsageError

REDUCERS = ("stack-limit", "huge-pages", "residue", "copy-threads")


@dataclass(frozen=True)
class Settings:
    """What a person may choose for a checkpoint. Seconds."""

    quiesce_timeout: float = 60.0
    checkpoint_timeout: float = 300.0
    return_timeout: float = 120.0
    reduce_stack: bool = True
    huge_pages: bool = True
    residue: bool = True
    copy_threads: bool = True
    in_place: bool = True  # GPUs write into the image's own pages, where they are huge
    cpu_pages: bool = True  # phosd copies the pages of frozen tasks, instead of CRIU
    residue_bytes: int = 0  # for a driver of which nothing is known yet; 0: as much as one of its kind usually wants

    @staticmethod
    def from_environment() -> Settings:
        """What phosd's environment says.

        PHOS_QUIESCE_SECONDS: of all tries together; PHOS_CHECKPOINT_SECONDS: how long the driver may take (whole GPUs
        are copied of processes without the frontend); PHOS_RETURN_SECONDS: how long a released process may take to come
        back; PHOS_REDUCERS: a comma-separated list of 'stack-limit', 'huge-pages', 'residue' and 'copy-threads', or
        'none'; PHOS_RESIDUE_BYTES: how much memory is prepared for what the driver saves, at a process's first
        checkpoint; PHOS_IN_PLACE, PHOS_CPU_PAGES: on or off.

        Raises:
            UsageError: one of them has no meaning.
        """
        text = os.environ.get("PHOS_REDUCERS", ",".join(REDUCERS))
        reducers = [] if text.strip() in ("", "none") else [name.strip() for name in text.split(",")]
        if unknown := set(reducers) - set(REDUCERS):
            raise UsageError(
                f"PHOS_REDUCERS={text} in phosd's environment: '{min(unknown)}' is no reducer. "
                f"It is a list of {', '.join(REDUCERS)} with commas between, or none."
            )
        return Settings(
            quiesce_timeout=_seconds("PHOS_QUIESCE_SECONDS", 60.0),
            checkpoint_timeout=_seconds("PHOS_CHECKPOINT_SECONDS", 300.0),
            return_timeout=_seconds("PHOS_RETURN_SECONDS", 120.0),
            reduce_stack="stack-limit" in reducers,
            huge_pages="huge-pages" in reducers,
            residue="residue" in reducers,
            copy_threads="copy-threads" in reducers,
            in_place=_switch("PHOS_IN_PLACE"),
            cpu_pages=_switch("PHOS_CPU_PAGES"),
            residue_bytes=size_of("PHOS_RESIDUE_BYTES", os.environ.get("PHOS_RESIDUE_BYTES", "0")),
        )

    def reducers(self) -> list[str]:
        """The names of the toggle reducers in use."""
        uses = self.reduce_stack, self.huge_pages, self.residue, self.copy_threads
        chosen = dict(zip(REDUCERS, uses, strict=True))
        return [name for name, used in chosen.items() if used]


def _switch(name: str) -> bool:
    text = os.environ.get(name, "on")
    if text not in ("on", "off"):
        raise UsageError(f"{name}={text} in phosd's environment is neither on nor off.")
    return text == "on"


def _seconds(name: str, default: float) -> float:
    text = os.environ.get(name, "")
    try:
        value = float(text) if text else default
    except ValueError:
        value = 0.0
    if not 0.0 < value < 1e6:
        raise UsageError(f"{name}={text} in phosd's environment is no number of seconds.")
    return value

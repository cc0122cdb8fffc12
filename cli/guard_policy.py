"""What ``phos-gpu guard`` decides: when to checkpoint, which images to keep, when to give up."""

from __future__ import annotations

import math
import re
import shutil
from collections import Counter, deque
from collections.abc import Callable
from pathlib import Path

from phos.images.errors import ImageError, ImageUnreadable
from phos.images.formats import COMMIT_FILE
from phos.images.reader import Image

ASSUMED_OVERHEAD = 1.0
"""Seconds that a checkpoint is taken to cost until one has been measured."""

LEAST_OVERHEAD = 0.001
LEAST_INTERVAL = 1.0
"""Seconds."""

FIRST_AT_LATEST = 60.0
"""Seconds until the first checkpoint, whatever the formula says: it measures the overhead."""

MEASURED = 5
"""As many of the last checkpoints say what one costs: a job's memory grows and shrinks."""


def optimal_frequency(gpus: int, failure_rate: float, overhead: float) -> float:
    """Checkpoints an hour that waste the least GPU time: the paper's f* = sqrt(N·F / (2·O)), appendix A.

    ``failure_rate`` is F in failures of one GPU an hour, ``overhead`` O in seconds that a checkpoint stalls the job.
    """
    return math.sqrt(gpus * failure_rate / (2 * overhead / 3600))


def wasted_share(gpus: int, failure_rate: float, overhead: float, frequency: float) -> float:
    """The share of GPU time lost to stalls and to work done again, by the paper's formula without the restore time."""
    return overhead / 3600 * frequency + failure_rate * gpus / (2 * frequency)


class Schedule:
    """When the next checkpoint is due."""

    def __init__(self, failure_rate: float, *, gpus: int = 1, interval: float | None = None) -> None:
        """``interval`` in seconds replaces the formula."""
        self.gpus = gpus
        self._failure_rate = failure_rate
        self._interval = interval
        self._stalls: deque[float] = deque(maxlen=MEASURED)

    def measured(self, stall: float | None) -> None:
        """A checkpoint was made; ``stall`` in seconds, None if nobody knows."""
        if stall is not None:
            self._stalls.append(max(stall, LEAST_OVERHEAD))

    @property
    def overhead(self) -> float:
        """What a checkpoint costs, in seconds of stall: the mean of the last ones."""
        return sum(self._stalls) / len(self._stalls) if self._stalls else ASSUMED_OVERHEAD

    @property
    def frequency(self) -> float:
        """f* as of now, in checkpoints an hour."""
        return optimal_frequency(self.gpus, self._failure_rate, self.overhead)

    @property
    def interval(self) -> float:
        """Seconds from the begin of one checkpoint to the begin of the next, if the former has ended by then."""
        if self._interval is not None:
            return self._interval
        regular = max(LEAST_INTERVAL, 3600 / self.frequency)
        return regular if self._stalls else min(regular, FIRST_AT_LATEST)


LONGEST_RETRY_SECONDS = 300.0
"""After a checkpoint that failed."""

REMIND_SECONDS = 3600.0
"""How often it is said that the same is wrong still."""


class Failures:
    """Checkpoints that failed in a row: when the next is due, and whether there is anything new to say."""

    def __init__(self) -> None:
        self.count = 0
        self.again = False
        """Whether what is said has been said before."""
        self._disturbed = 0
        self._complaint = ""
        self._said = 0.0

    def wait(self, first: float, *, disturbs: bool) -> float:
        """One more. Seconds until the next: ``first`` of them, or fewer, after the first one.

        ``disturbs``: the job may have stood still for nothing, for as long as a minute. So each such wait is twice as
        long as the one before.
        """
        self.count += 1
        self._disturbed += disturbs
        return min(first * 2 ** min(max(0, self._disturbed - 1), 20), LONGEST_RETRY_SECONDS)

    def is_news(self, complaint: str, now: float) -> bool:
        """Whether to say it: it is another one than before, or was said long ago."""
        self.again = complaint == self._complaint
        if self.again and now - self._said < REMIND_SECONDS:
            return False
        self._complaint, self._said = complaint, now
        return True


TRIES = 2
"""After so many ends of the job without getting further than before, older images come before the one that it was
brought back from: once may be another failure."""


class Restarts:
    """Whether to bring a job back once more.

    A job that fails at the same point again and again is not helped by it. Points are seconds of computing since the
    job's start; work that is done again after a restore passes the same points again.
    """

    def __init__(self, limit: int) -> None:
        """``limit``: restarts in a row that end without the job getting further than before."""
        self._limit = limit
        self._furthest = 0.0
        self.in_vain = 0

    def failed(self, point: float, margin: float) -> bool:
        """The job failed at ``point``; ``margin`` seconds beyond the furthest before is progress. False: give up."""
        if point > self._furthest + margin:
            self.in_vain = 0
        self._furthest = max(self._furthest, point)
        self.in_vain += 1
        return self.in_vain <= self._limit


def is_whole(image: Path) -> bool | None:
    """Whether an image is committed and, as far as its metadata tell, undamaged. None: it cannot be read, perhaps
    because another release of PhOS made it."""
    try:
        Image.open(image).close()
    except (ImageUnreadable, OSError):
        return None
    except ImageError:
        return False
    return True


class Shelf:
    """The images of one job: ``image-000001`` and so on. Older ones are removed only for newer whole ones.

    One that cannot be read may be whole: it is not counted, and not removed.
    """

    _NAME = re.compile(r"image-(\d{6,})")

    def __init__(self, folder: Path, keep: int, whole: Callable[[Path], bool | None] = is_whole) -> None:
        """``keep``: so many whole images stay, at least 1."""
        self.folder = folder
        self._keep = max(1, keep)
        self._whole = whole
        self._last = max((self._number(image) for image in self.images()), default=0)
        self.doubted: set[Path] = set()
        """Those that could not be restored, whatever their metadata say, or only to end again: they do not count when
        others are removed."""
        self._in_vain: Counter[Path] = Counter()  # how often the job came back from an image, only to end again

    def _number(self, image: Path) -> int:
        found = self._NAME.fullmatch(image.name)
        return int(found[1]) if found else 0

    def images(self) -> list[Path]:
        """All images, whole or not, oldest first.

        Raises:
            OSError: the folder cannot be read.
        """
        found = [entry for entry in self.folder.iterdir() if self._NAME.fullmatch(entry.name) and entry.is_dir()]
        return sorted(found, key=self._number)

    def whole(self) -> list[Path]:
        """The whole images, newest first."""
        return [image for image in reversed(self.images()) if self._whole(image)]

    def to_try(self) -> list[Path]:
        """The whole images in the order in which the job is to be brought back from them: newest first.

        One that was made when a process of the job had died and the job had not noticed yet brings back a job that ends
        again: after TRIES of that, the others come first.
        """
        return sorted(self.whole(), key=lambda image: self._in_vain[image] // TRIES)

    def came_to_nothing(self, image: Path) -> bool:
        """The job came back from this image only to end again. Whether others come before it now."""
        self._in_vain[image] += 1
        if self._in_vain[image] < TRIES:
            return False
        self.doubted.add(image)
        return self._in_vain[image] % TRIES == 0

    def unreadable(self) -> list[Path]:
        """The images of which nobody knows whether they are whole, newest first."""
        return [image for image in reversed(self.images()) if self._whole(image) is None]

    def passed_over(self, image: Path) -> list[Path]:
        """The newer ones of which nobody knows whether they are whole, newest first."""
        return [newer for newer in self.unreadable() if self._number(newer) > self._number(image)]

    def next(self) -> Path:
        """Where the next image goes; a number is never used twice."""
        self._last += 1
        return self.folder / f"image-{self._last:06}"

    def tidy(self) -> list[Path]:
        """Remove incomplete images, and whole ones beyond the newest that are to be kept. Returns what was removed.

        One that is doubted stays as long as it would otherwise, and so does one more older image for it.

        Not while an image is being written.

        Raises:
            OSError: the folder cannot be read, or an image not be removed.
        """
        found = [(image, self._whole(image)) for image in reversed(self.images())]
        kept: list[Path] = []
        for image, whole in found:
            if whole and sum(each not in self.doubted for each in kept) < self._keep:
                kept.append(image)
        gone = [image for image, whole in reversed(found) if whole is not None and image not in kept]
        for image in gone:
            self.remove(image)
        return gone

    @staticmethod
    def remove(image: Path) -> None:
        """Remove an image; interrupted, it leaves one that does not pass for whole."""
        (image / COMMIT_FILE).unlink(missing_ok=True)
        shutil.rmtree(image, ignore_errors=True)

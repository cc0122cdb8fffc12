"""The exceptions of the image library."""

from __future__ import annotations

from collections.abc import Sequence


class ImageError(Exception):
    """An image cannot be written, read or trusted.

    The message is a sentence that names the file and says what is wrong and, where there is one, the remedy.
    `problems` lists every problem found when there were several (the message then is the first and a count).
    What holds afterwards: nothing was changed in an image that was being read; a writer that raised has to be aborted
    (leaving its `with` block does it).
    """

    exit_status = 1

    def __init__(self, message: str, problems: Sequence[str] = ()) -> None:
        super().__init__(message)
        self.problems: list[str] = list(problems) or [message]


class ImageUnreadable(ImageError):
    """Nobody can say whether the image is whole: some of it is there and cannot be read (permissions, broken disk), or
    it is of a format that this release does not know."""

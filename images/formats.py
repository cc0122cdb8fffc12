"""The table of our image files: magic, file name, message and handler, and the framing they share with CRIU's.

    offset  0  u32  0x54564319        IMG_COMMON, CRIU's mark of an image file
            4  u32  type magic        FORMATS below
            8  u32  size of message   ┐ repeated until the end of the file
           12  …    message           ┘

All little-endian. `register_with_pycriu` teaches CRIU's own `crit` the same table.
"""

from __future__ import annotations

import math
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, BinaryIO

import xxhash
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import DecodeError, Message

from phos.gen import phos_image_pb2 as pb
from phos.images.errors import ImageError

FORMAT_VERSION = 2

IMG_COMMON = 0x54564319  # CRIU's magics, criu/include/magic.h
IMG_SERVICE = 0x55105940
STATS_MAGIC = 0x57093306

HASH_SIZE = 16
ALIGNMENT = 4096  # of every file offset of a run: what O_DIRECT asks for on any block device with pages of 4096 bytes
SEGMENT_SIZE = 8 << 20  # of the hashes of whole files: a driver's part of some hundred MB keeps sixteen threads busy

INVENTORY_FILE = "phos-inventory.img"
CHUNKS_FILE = "phos-chunks.img"
COMMIT_FILE = "phos-commit.img"
COMMIT_TEMPORARY = "phos-commit.img.tmp"
ORDER_FILE = "phos-order.img"
ORDER_TEMPORARY = "phos-order.img.tmp"
CRIU_INVENTORY_FILE = "inventory.img"
CRIU_STATS_FILE = "stats-dump"

BlockKey = tuple[bytes, int]
"""The owner's 16-byte session and the block's number in it."""

_U32 = struct.Struct("<I")
# As data_file() writes a number, and in no other way: two names of one stripe would be two files.
_DATA_NAME = re.compile(r"phos-data-(0|[1-9][0-9]*)\.raw")
_ADDED_NAME = re.compile(r"phos-(residue|shared)-\d+\.raw")
_PAGES_NAME = re.compile(r"phos-pages-(shared-|room-)?\d+\.raw")


def data_file(stripe: int) -> str:
    return f"phos-data-{stripe}.raw"


def stripe_of(name: str) -> int | None:
    """The stripe whose data file is called `name`; None if it is no data file."""
    match = _DATA_NAME.fullmatch(name)
    return int(match[1]) if match else None


def residue_file(number: int) -> str:
    """The name of a file with what the driver saved into memory that CRIU does not dump."""
    return f"phos-residue-{number}.raw"


def named_memory_file(number: int) -> str:
    """The name of a file with memory that processes share by a name."""
    return f"phos-shared-{number}.raw"


def is_added(name: str) -> bool:
    """True for a copy of a file that the processes had mapped, whole: ImageWriter.add_file() has made it."""
    return _ADDED_NAME.fullmatch(name) is not None


def task_pages_file(pid: int) -> str:
    """The name of a file with pages of a task, which become part of CRIU's own before the image is committed."""
    return f"phos-pages-{pid}.raw"


def shared_pages_file(inode: int) -> str:
    """Likewise, of a file with pages of memory that tasks share without a name."""
    return f"phos-pages-shared-{inode}.raw"


def shared_room_file(number: int) -> str:
    """Likewise, of a file that was made before it was known what it is for."""
    return f"phos-pages-room-{number}.raw"


def is_ours(name: str) -> bool:
    named = name in (INVENTORY_FILE, CHUNKS_FILE, COMMIT_FILE, COMMIT_TEMPORARY, ORDER_FILE)
    return named or stripe_of(name) is not None or is_added(name) or _PAGES_NAME.fullmatch(name) is not None


def is_criu_image(name: str) -> bool:
    """True for the files of CRIU's that make up its image: not its logs, pid files, sockets and statistics."""
    return name.endswith(".img") and not is_ours(name)


def align_up(value: int) -> int:
    return (value + ALIGNMENT - 1) & ~(ALIGNMENT - 1)


def digest(data: Any) -> bytes:
    """XXH3-128 of a buffer, canonical form. Releases the GIL for anything of a chunk's size."""
    hash_: bytes = xxhash.xxh3_128_digest(data)
    return hash_


_zero_digests: dict[int, bytes] = {}  # benign race: two threads store the same value


def zero_digest(length: int) -> bytes:
    """The hash of `length` zero bytes, remembered."""
    known = _zero_digests.get(length)
    if known is None:
        if len(_zero_digests) > 4096:
            _zero_digests.clear()
        known = _zero_digests[length] = digest(bytes(length))
    return known


# ------------------------------------------------------------------------------------------------------- the table


def _exactly_one(messages: Sequence[Message]) -> str:
    return "" if len(messages) == 1 else f"holds {len(messages)} messages instead of one"


def _any_number(messages: Sequence[Message]) -> str:
    return ""


def _record_and_seal(messages: Sequence[Message]) -> str:
    kinds = [m.WhichOneof("entry") for m in messages]
    if kinds == ["record", "seal"]:
        return ""
    return "is cut off or altered: it must hold a record and then its seal"


@dataclass(frozen=True, slots=True)
class Format:
    """One kind of file: `handler` gets its messages and says what is wrong with them as a whole ('' if nothing)."""

    magic: int
    name: str
    file: str
    message: type[Message]
    handler: Callable[[Sequence[Message]], str]


FORMATS = (
    Format(0x50684F01, "PHOS_INVENTORY", INVENTORY_FILE, pb.Inventory, _exactly_one),
    Format(0x50684F02, "PHOS_CHUNKS", CHUNKS_FILE, pb.BlockTable, _any_number),
    Format(0x50684F03, "PHOS_COMMIT", COMMIT_FILE, pb.CommitEntry, _record_and_seal),
)
INVENTORY, CHUNKS, COMMIT = FORMATS
ORDER = Format(0x50684F04, "PHOS_ORDER", ORDER_FILE, pb.Order, _exactly_one)
"""Of a file that lies beside an image, but is no part of it."""
BY_MAGIC = {f.magic: f for f in (*FORMATS, ORDER)}
BY_FILE = {f.file: f for f in (*FORMATS, ORDER)}


# ------------------------------------------------------------------------------------------------------ the framing


def frame_header(format_: Format) -> bytes:
    return _U32.pack(IMG_COMMON) + _U32.pack(format_.magic)


def frame(message: Message) -> bytes:
    body: bytes = message.SerializeToString()
    return _U32.pack(len(body)) + body


def frame_file(format_: Format, messages: Iterable[Message]) -> bytes:
    """A whole file's bytes."""
    return b"".join([frame_header(format_), *(frame(m) for m in messages)])


def split_frames(raw: bytes, name: str, start: int = 8) -> Iterator[tuple[int, bytes]]:
    """(offset of the size field, message bytes) of each entry; ImageError where the file is cut off."""
    at = start
    while at < len(raw):
        if at + 4 > len(raw):
            raise ImageError(f"{name} is cut off at byte {len(raw)}, inside a length field")
        (size,) = _U32.unpack_from(raw, at)
        if size > len(raw) - at - 4:
            left = len(raw) - at - 4
            raise ImageError(
                f"{name} is cut off or damaged: the message at byte {at} claims {size} bytes, {left} follow"
            )
        yield at, raw[at + 4 : at + 4 + size]
        at += 4 + size


def format_of(raw: bytes, name: str) -> Format:
    """Which of our formats a file's first bytes name; ImageError if none."""
    if len(raw) < 8:
        raise ImageError(f"{name} is {'empty' if not raw else 'cut off inside its magic'}: the writing did not finish")
    common, magic = _U32.unpack_from(raw, 0)[0], _U32.unpack_from(raw, 4)[0]
    if common != IMG_COMMON or magic not in BY_MAGIC:
        raise ImageError(f"{name} does not begin with the magic of a PhOS image file (found {common:#x}, {magic:#x})")
    return BY_MAGIC[magic]


def parse_file(raw: bytes, name: str, expect: Format | None = None) -> list[Any]:
    """The messages in a file's bytes. Any damage that shows in the framing or the encoding is an ImageError."""
    format_ = format_of(raw, name)
    if expect is not None and format_ is not expect:
        raise ImageError(f"{name} holds {format_.name} data instead of {expect.name}: files were mixed up")
    messages: list[Any] = []
    for at, body in split_frames(raw, name):
        message = format_.message()
        try:
            message.ParseFromString(body)
        except (DecodeError, RuntimeError, ValueError) as error:
            raise ImageError(f"{name}: the message at byte {at} cannot be decoded ({error})") from None
        messages.append(message)
    complaint = format_.handler(messages)
    if complaint:
        raise ImageError(f"{name} {complaint}")
    return messages


# --------------------------------------------------------------------------------------------------- decoding to JSON


def to_json(message: Message) -> dict[str, Any]:
    """A message as JSON-ready objects: only fields that are set, bytes in hexadecimal, a run's hashes one by one."""
    out: dict[str, Any] = {}
    for field, value in message.ListFields():
        if field.full_name == pb.Run.DESCRIPTOR.fields_by_name["hashes"].full_name:
            out[field.name] = [value[i : i + HASH_SIZE].hex() for i in range(0, len(value), HASH_SIZE)]
        elif isinstance(value, (str, bytes, int, float, Message)):
            out[field.name] = _json_value(field, value)
        else:
            out[field.name] = [_json_value(field, item) for item in value]
    return out


def _json_value(field: FieldDescriptor, value: Any) -> Any:
    if isinstance(value, Message):
        return to_json(value)
    if isinstance(value, bytes):
        return value.hex()
    if field.enum_type is not None:
        known = field.enum_type.values_by_number.get(value)
        return known.name if known else value
    if isinstance(value, float) and not math.isfinite(value):
        return None  # JSON has no such numbers
    return value


def from_json(message: Message, fields: dict[str, Any]) -> None:
    """The reverse of `to_json`: fills in an empty message. KeyError or ValueError if the fields do not fit."""
    for name, value in fields.items():
        field = message.DESCRIPTOR.fields_by_name[name]
        if field.message_type is not None:
            if isinstance(value, list):
                for item in value:
                    from_json(getattr(message, name).add(), item)
            else:
                getattr(message, name).SetInParent()
                from_json(getattr(message, name), value)
        elif field.type == FieldDescriptor.TYPE_BYTES and isinstance(value, list) and name == "hashes":
            whole = [bytes.fromhex(item) for item in value]
            if isinstance(getattr(message, name), bytes):
                message.hashes = b"".join(whole)  # type: ignore[attr-defined]
            else:
                getattr(message, name).extend(whole)
        elif isinstance(value, list):
            getattr(message, name).extend(_plain_value(field, item) for item in value)
        else:
            setattr(message, name, _plain_value(field, value))


def _plain_value(field: FieldDescriptor, value: Any) -> Any:
    if field.type == FieldDescriptor.TYPE_BYTES:
        return bytes.fromhex(value)
    if field.enum_type is not None and isinstance(value, str):
        return field.enum_type.values_by_name[value].number
    return value


def decode(raw: bytes, name: str) -> dict[str, Any]:
    """What `crit decode` would print for one of our files: {"magic": …, "entries": […]}."""
    format_ = format_of(raw, name)
    return {"magic": format_.name, "entries": [to_json(m) for m in parse_file(raw, name)]}


class CritHandler:
    """What pycriu wants of a handler, for one of our formats.

    Not pycriu's own entry handler: that one knows no floating-point fields, nor a run's hashes.
    """

    def __init__(self, format_: Format) -> None:
        self._format = format_

    def load(self, file: BinaryIO, pretty: bool = False, no_payload: bool = False) -> list[dict[str, Any]]:
        """The messages that follow the magics, as `to_json` shows them."""
        return self.loads(file.read(), pretty)

    def loads(self, raw: bytes, pretty: bool = False) -> list[dict[str, Any]]:
        messages = parse_file(frame_header(self._format) + raw, self._format.file)
        return [to_json(message) for message in messages]

    def dump(self, entries: Iterable[dict[str, Any]], file: BinaryIO) -> None:
        file.write(self.dumps(entries))

    def dumps(self, entries: Iterable[dict[str, Any]]) -> bytes:
        out = []
        for entry in entries:
            message = self._format.message()
            from_json(message, entry)
            out.append(frame(message))
        return b"".join(out)

    def count(self, file: BinaryIO) -> int:
        return sum(1 for _ in split_frames(file.read(), self._format.file, start=0))


def register_with_pycriu() -> bool:
    """Add FORMATS to pycriu's tables, so that `crit decode`, `show` and `info` know our files. False: no pycriu here.

    pycriu keeps two tables, magic by name and by value (pycriu.images.magic) and handler by name
    (pycriu.images.images.handlers); nothing else needs to know a type (tested with 4.1.1).
    """
    try:
        from pycriu.images import images, magic
    except ImportError:
        return False
    for format_ in (*FORMATS, ORDER):
        magic.by_name[format_.name] = format_.magic
        magic.by_val[format_.magic] = format_.name
        images.handlers[format_.name] = CritHandler(format_)
    return True

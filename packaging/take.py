"""`phos-gpu pool take`: phosd is asked before anything slow is imported.

    take.py pool take NAME [OPTION...]

Somebody waits for the process, and half of that time is Python's, reading the command line's parts. So a command line
that is understood at once is sent from here, with the interpreter alone; then `phos-gpu` goes on as always, with the
connection. Any other command line is its business from the beginning. Started with -S: what `site` does waits as well.
"""

import _socket
import _struct
import os
import sys

# proto/wire.proto; tests/unit/test_install_take.py compares.
ENVELOPE_ID, ENVELOPE_POOL_TAKE = 1, 61
TAKE_NAME, TAKE_WAIT, TAKE_EAGER = 1, 2, 3
VARINT, FIXED64, BYTES = 0, 1, 2

WAIT_SECONDS = 60.0
PATH_BYTES = 4095  # cli/parameters.py
LONGEST_SECONDS = 1e8  # cli/parameters.py
ANSWER_SECONDS = 10  # gpu_engine/daemon/reach.py


def parse(words: list[str]) -> tuple[str, float, bool] | None:
    """(name, seconds to wait, eager) of the words behind `pool take`; None: they are left to phos-gpu."""
    names, wait, patient, eager = [], WAIT_SECONDS, True, False
    rest = iter(words)
    for word in rest:
        if word == "--eager":
            eager = True
        elif word == "--no-wait":
            patient = False
        elif word == "--timeout" or word.startswith("--timeout="):
            try:
                wait = float(word[10:] if "=" in word else next(rest, ""))
            except ValueError:
                return None
            if not 0 <= wait <= LONGEST_SECONDS:
                return None
        elif word.startswith("-"):
            if word not in ("--quick", "--json"):
                return None
        else:
            names.append(word)
    if len(names) != 1 or not names[0] or not names[0].isprintable() or len(names[0].encode()) > PATH_BYTES:
        return None
    name = os.path.abspath(names[0]) if "/" in names[0] else names[0]  # cli/parameters.py
    return name, wait if patient else 0.0, eager


def varint(value: int) -> bytes:
    """A number in base 128, the least significant digits first."""
    digits = bytearray()
    while value > 0x7F:
        digits.append(value & 0x7F | 0x80)
        value >>= 7
    digits.append(value)
    return bytes(digits)


def field(number: int, kind: int, content: bytes) -> bytes:
    """One field of a protobuf message."""
    length = varint(len(content)) if kind == BYTES else b""
    return varint(number << 3 | kind) + length + content


def packet(name: str, wait: float, eager: bool) -> bytes:
    """The request, as proto/wire.proto has it; what is zero is left out."""
    take = field(TAKE_NAME, BYTES, name.encode())
    if wait:
        take += field(TAKE_WAIT, FIXED64, _struct.pack("<d", wait))
    if eager:
        take += field(TAKE_EAGER, VARINT, varint(1))
    return field(ENVELOPE_ID, VARINT, varint(1)) + field(ENVELOPE_POOL_TAKE, BYTES, take)


def socket_path() -> str:
    """As gpu_engine/daemon/paths.py."""
    system = "/run/phos/phosd.sock"
    if named := os.environ.get("PHOS_SOCKET"):
        return named
    if os.geteuid() == 0 or os.path.exists(system):
        return system
    return os.path.join(os.environ.get("XDG_RUNTIME_DIR", f"/tmp/phos-{os.geteuid()}"), "phos", "phosd.sock")


def ask(words: list[str]) -> int | None:
    """Send the request. Returns the connection's descriptor; None: phos-gpu is to do it, and to say what is wrong."""
    wanted = parse(words)
    if wanted is None:
        return None
    connection = _socket.socket(_socket.AF_UNIX, _socket.SOCK_SEQPACKET)
    limit = _socket.SOL_SOCKET, _socket.SO_SNDTIMEO  # of connecting as well
    try:
        connection.setsockopt(*limit, _struct.pack("ll", ANSWER_SECONDS, 0))
        connection.connect(socket_path())
        connection.send(packet(*wanted))
        connection.setsockopt(*limit, _struct.pack("ll", 0, 0))
    except OSError:
        connection.close()
        return None
    return connection.detach()


def main() -> None:
    """See the module's text."""
    try:
        asked = ask(sys.argv[3:])
        if sys.flags.no_site:
            import site

            site.main()
        from phos.cli.main import main as command_line
    except KeyboardInterrupt:
        sys.exit(130)

    command_line(prog_name="phos-gpu", obj=asked)


if __name__ == "__main__":
    main()

"""A server without sockets: requests are files, answers are lines. Shared by the programs that answer with tokens.

Request N is the file N in the folder of --requests: the number of tokens wanted, which of the --models is asked (from
0), then the prompt's tokens, all in one line. The program looks for its next request every millisecond and does nothing
else meanwhile. Times are seconds since 1970 on the clock of the machine, so that whoever wrote the request can compare
them with its own. Lines:

    READY <bytes of weights> <time> <text>
    ANSWER <N> <received> <launched> <first> <last> <token>,<token>,...

`received`: the file was seen; `launched`: the first kernel had been launched; `first` and `last`: that token was known
to the program. With --log-layers also, as soon as that layer's kernels (token <i> of request <N>) have been launched:

    LAYER <N> <i> <layer>
"""

from __future__ import annotations

import argparse
import hashlib
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "examples"))
from report import Report  # of examples

POLL_SECONDS = 0.001

Layered = Callable[[int], None]
"""Told the number of each layer whose kernels have been launched."""


def add_options(options: argparse.ArgumentParser) -> None:
    """Add the options that every server has."""
    options.add_argument("--requests", type=Path, required=True, metavar="DIR", help="where requests appear")
    options.add_argument("--first", type=int, default=0, metavar="N", help="number of the first request (%(default)s)")
    options.add_argument("--report", type=Path, metavar="FILE", help="append the printed lines to FILE as well")
    options.add_argument("--bytes", type=float, default=1e9, metavar="N", help="of all weights (%(default)s)")
    options.add_argument(
        "--build-order",
        choices=("files", "layers"),
        default="files",
        help="allocate weights in the order in which files of weights hold them, which is that of their names, or in "
        "the order of their use (%(default)s)",
    )
    options.add_argument(
        "--models", type=int, default=1, metavar="N", help="hold N models, all of them --bytes (%(default)s)"
    )
    options.add_argument("--longest", type=int, default=1024, metavar="N", help="prompt and answer (%(default)s)")
    options.add_argument("--log-layers", action="store_true", help="print a line for each layer of each token")
    options.add_argument(
        "--token-seconds", type=float, default=0.0, metavar="S", help="sleep S seconds after each token"
    )
    options.add_argument("--seed", type=int, default=1)


class Decoder(ABC):
    """What a program must offer to be served: one token after another."""

    layers = 0

    @abstractmethod
    def begin(self, prompt: Sequence[int], layered: Layered) -> None:
        """Launch the work on a prompt. The first kernel has been launched when `layered` is called for layer -1."""

    @abstractmethod
    def token(self) -> int:
        """Return the token that follows all that was given so far."""

    @abstractmethod
    def go_on(self, token: int, layered: Layered) -> None:
        """Launch the work on the next token."""


def read_request(path: Path) -> tuple[int, int, list[int]]:
    """Return how many tokens are wanted, of which model, and the prompt. The file appeared whole, by a rename."""
    count, model, *prompt = (int(word) for word in path.read_text().split())
    return count, model, prompt


def ready(report: Report, size: int, text: str) -> None:
    """Say that requests will be answered from now on; `size`: bytes of weights."""
    report.line(f"READY {size} {time.time():.6f} {text}")


def answer(number: int, decoders: Sequence[Decoder], path: Path, report: Report, options: argparse.Namespace) -> None:
    """Answer one request."""
    received = time.time()
    count, model, prompt = read_request(path)
    decoder = decoders[model]
    launched = first = 0.0
    tokens: list[int] = []

    def layered(layer: int) -> None:
        nonlocal launched
        if layer < 0:
            launched = launched or time.time()
        elif options.log_layers:
            report.line(f"LAYER {number} {len(tokens)} {layer}")

    decoder.begin(prompt, layered)
    while True:
        tokens.append(decoder.token())
        last = time.time()
        first = first or last
        if len(tokens) >= count:
            break
        if options.token_seconds > 0:
            time.sleep(options.token_seconds)
        decoder.go_on(tokens[-1], layered)
    listed = ",".join(map(str, tokens))
    report.line(f"ANSWER {number} {received:.6f} {launched:.6f} {first:.6f} {last:.6f} {listed}")


def serve(decoders: Sequence[Decoder], options: argparse.Namespace, report: Report) -> None:
    """Answer requests for ever, until a file `end` appears. Does not return before that."""
    number = options.first
    end = options.requests / "end"
    while True:
        path = options.requests / str(number)
        while not path.exists():
            if end.exists():
                return
            time.sleep(POLL_SECONDS)
        answer(number, decoders, path, report, options)
        number += 1


def file_order(names: Sequence[str], order: str) -> list[str]:
    """Return the names of weights in the order in which they are to be allocated: see --build-order."""
    return sorted(names) if order == "files" else list(names)


def weight_seed(seed: int, name: str) -> int:
    """Return a seed of a weight's own: what it holds does not depend on the order in which weights are made."""
    return int.from_bytes(hashlib.blake2b(f"{seed} {name}".encode(), digest_size=6).digest(), "big")

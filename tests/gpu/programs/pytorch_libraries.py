#!/usr/bin/env python3
"""PyTorch through the libraries and allocators that training loops seldom show: each part prints what it computed.

pytorch_libraries.py [--parts fft,solver,...] and the options of every example. Every part keeps tensors from one
iteration to the next, so that what a restore brought back goes into all that follows.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # or cuBLAS may add up in another order

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import MASK_64, Report, parser
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

SIZE = 512


def digest(*tensors: torch.Tensor) -> int:
    """Of every bit of them."""
    total = 0
    for tensor in tensors:
        words = tensor.detach().contiguous().reshape(-1).view(torch.uint8).to(torch.int64)
        places = torch.arange(1, words.numel() + 1, device=words.device)
        total = (total * 1000003 + int((words * places).sum().item())) & MASK_64
    return total


def fft() -> Callable[[int], int]:
    """cuFFT: plans with their workspace."""
    signal = torch.randn(64, 4096, device="cuda", dtype=torch.complex64)

    def step(iteration: int) -> int:
        spectrum = torch.fft.fft(signal) * (1 + iteration % 3)
        signal.copy_(torch.fft.ifft(spectrum) / (1 + iteration % 3))
        return digest(torch.view_as_real(signal), torch.fft.rfft2(signal.real).real)

    return step


def solver() -> Callable[[int], int]:
    """cuSOLVER: factorisations, eigenvalues."""
    matrix = torch.randn(128, 128, device="cuda", dtype=torch.float64)

    def step(_iteration: int) -> int:
        symmetric = matrix @ matrix.T + 128 * torch.eye(128, device="cuda", dtype=torch.float64)
        lower = torch.linalg.cholesky(symmetric)
        solution = torch.linalg.solve(symmetric, matrix)
        values = torch.linalg.eigvalsh(symmetric)
        matrix.add_(solution).div_(matrix.abs().max())
        return digest(lower, solution, values)

    return step


def sparse() -> Callable[[int], int]:
    """cuSPARSE, with small integers: exact, however it adds them up."""
    dense = (torch.rand(SIZE, SIZE, device="cuda") < 0.05).float()
    matrix = dense.to_sparse_csr()
    vectors = torch.randint(0, 8, (SIZE, 16), device="cuda").float()

    def step(_iteration: int) -> int:
        vectors.copy_(torch.remainder(matrix @ vectors, 16))
        return digest(vectors)

    return step


def recurrent() -> Callable[[int], int]:
    """cuDNN's LSTM, whose dropout has a state in GPU memory."""
    lstm = torch.nn.LSTM(64, 64, num_layers=2, dropout=0.2, batch_first=True).cuda()
    optimizer = torch.optim.SGD(lstm.parameters(), lr=0.01)
    inputs = torch.randn(8, 32, 64, device="cuda")

    def step(_iteration: int) -> int:
        optimizer.zero_grad()
        loss = lstm(inputs)[0].square().mean()
        loss.backward()
        optimizer.step()
        return digest(loss, *lstm.parameters())

    return step


def attention() -> Callable[[int], int]:
    """The fused kernels of scaled_dot_product_attention, and eight-bit matrix products."""
    heads = torch.randn(3, 2, 8, 256, 64, device="cuda", dtype=torch.bfloat16)
    scale = torch.ones((), device="cuda")

    def step(_iteration: int) -> int:
        mixed = functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True)
        heads[0].copy_(mixed)
        left = heads[0].reshape(-1, 64).to(torch.float8_e4m3fn)
        right = heads[1].reshape(-1, 64)[:64].to(torch.float8_e4m3fn)
        product = torch._scaled_mm(left, right.t(), scale_a=scale, scale_b=scale, out_dtype=torch.bfloat16)
        return digest(mixed, product)

    return step


def attention_backwards() -> Callable[[int], int]:
    """The fused kernels backwards, adding up in a fixed order."""
    heads = torch.randn(3, 2, 4, 256, 128, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    def step(_iteration: int) -> int:
        torch.use_deterministic_algorithms(True)
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION):
            functional.scaled_dot_product_attention(*heads.unbind(0), is_causal=True).square().sum().backward()
        torch.use_deterministic_algorithms(False)
        assert heads.grad is not None
        found = digest(heads.grad)
        with torch.no_grad():
            heads.sub_(heads.grad, alpha=0.01)
        heads.grad = None
        return found

    return step


def grouped() -> Callable[[int], int]:
    """CUTLASS's products of a group, whose addresses lie in GPU memory, as experts are computed (Hopper)."""
    rows = torch.randn(256, 128, device="cuda", dtype=torch.bfloat16)
    experts = torch.randn(4, 128, 128, device="cuda", dtype=torch.bfloat16) / 16
    ends = torch.tensor([64, 96, 200, 256], device="cuda", dtype=torch.int32)

    def step(_iteration: int) -> int:
        rows.copy_(torch.tanh(torch._grouped_mm(rows, experts, offs=ends)))
        return digest(rows)

    return step


def compiled_at_run_time() -> Callable[[int], int]:
    """A kernel that PyTorch has NVRTC compile."""
    code = "template <typename T> T mixed(T x, T y) { return x * T(0.5) + y * y; }"
    function = torch.cuda.jiterator._create_jit_fn(code)
    values = torch.randn(SIZE, SIZE, device="cuda")

    def step(iteration: int) -> int:
        values.copy_(torch.tanh(function(values, torch.full_like(values, iteration % 5))))
        return digest(values)

    return step


def drawn() -> Callable[[int], int]:
    """Random numbers, by PyTorch's generator for the GPU and by one of the program's own."""
    own = torch.Generator("cuda").manual_seed(7)
    kept = torch.zeros(SIZE, SIZE, device="cuda")

    def step(_iteration: int) -> int:
        kept.add_(torch.randn(SIZE, SIZE, device="cuda", generator=own))
        weights = functional.dropout(kept.abs() + 1, 0.3)
        picks = torch.multinomial(weights, 4)
        return digest(kept, picks, torch.randperm(1000, device="cuda"))

    return step


def sorted_and_counted() -> Callable[[int], int]:
    """CUB's sorts, scans and selections, and atomics on integers."""
    keys = torch.randint(0, 1000, (100_000,), device="cuda")

    def step(iteration: int) -> int:
        keys.mul_(31).add_(iteration).remainder_(1009)
        ordered, places = torch.sort(keys, stable=True)
        counts = torch.bincount(keys, minlength=1009)
        unique = torch.unique(keys)
        largest = torch.topk(counts.float(), 10)[0]
        return digest(ordered, places, counts, unique, largest, keys.cumsum(0))

    return step


def pooled() -> Callable[[int], int]:
    """A pool of the program's own, two streams with priorities, events with times, and memory that comes and goes."""
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        kept = torch.zeros(4 << 20, dtype=torch.int32, device="cuda")
    urgent, usual = torch.cuda.Stream(priority=-1), torch.cuda.Stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()

    def step(iteration: int) -> int:
        urgent.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(urgent):
            passing = torch.full((4 << 20,), iteration, dtype=torch.int32, device="cuda")
            kept.add_(passing)
        usual.wait_stream(urgent)
        with torch.cuda.stream(usual):
            kept.mul_(3)
            end.record()
        torch.cuda.current_stream().wait_stream(usual)
        torch.cuda.synchronize()
        assert begin.elapsed_time(end) >= 0
        if iteration % 8 == 7:
            del passing
            torch.cuda.empty_cache()
        return digest(kept)

    return step


def replayed() -> Callable[[int], int]:
    """torch.compile's own graphs: one for each shape, in a pool that they share."""
    weight = torch.randn(64, 64, device="cuda")

    @torch.compile(mode="reduce-overhead")
    def function(x: torch.Tensor) -> torch.Tensor:
        return functional.dropout(torch.relu(x @ weight), 0.1) + x.sum(1, keepdim=True)

    kept = {rows: torch.ones(rows, 64, device="cuda") for rows in (32, 48)}

    def step(_iteration: int) -> int:
        for rows, values in kept.items():
            torch.compiler.cudagraph_mark_step_begin()
            kept[rows] = torch.sin(function(values).clone())
        return digest(*kept.values())

    return step


PARTS = {
    part.__name__: part
    for part in (
        fft,
        solver,
        sparse,
        recurrent,
        attention,
        attention_backwards,
        grouped,
        compiled_at_run_time,
        drawn,
        sorted_and_counted,
        pooled,
        replayed,
    )
}


def main() -> None:
    """Run the parts in turns."""
    options = parser("PyTorch's libraries.", iterations=20)
    options.add_argument("--parts", default=",".join(PARTS), metavar="NAMES", help="which (%(default)s)")
    chosen = options.parse_args()
    report = Report(chosen)
    torch.manual_seed(1)
    torch.backends.cudnn.deterministic = True
    steps = {name: PARTS[name]() for name in chosen.parts.split(",")}
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    for iteration in range(chosen.iterations):
        digests = {name: step(iteration) for name, step in steps.items()}
        total = 0
        for value in digests.values():
            total = (total * 31 + value) & MASK_64
        report.step(total, " ".join(f"{name} {value:x}" for name, value in digests.items()))
    report.result()


if __name__ == "__main__":
    main()

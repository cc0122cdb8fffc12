#!/usr/bin/env python3
"""Two ranks with a GPU each that train one network: the gradients of every iteration are added up by NCCL.

By a call for each of them, by DistributedDataParallel, or by fully_shard (FSDP), where each rank has half of every
weight and of what AdamW keeps of it, and gets the other half for as long as a layer computes. The process itself has
nothing to do with CUDA; it starts both and waits for them. Rank 0 reports. Each rank checks in every iteration that
the other has the same weights, where both have all of them.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # before PyTorch is loaded: sums in a fixed order

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
from report import Report, parser


def train(options: argparse.Namespace) -> None:
    """One rank."""
    import torch
    import torch.distributed as ranks
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from torch.nn.parallel import DistributedDataParallel

    store = f"file://{options.report}.store"
    torch.cuda.set_device(options.rank)
    torch.manual_seed(1)
    torch.use_deterministic_algorithms(True)
    ranks.init_process_group("nccl", init_method=store, rank=options.rank, world_size=2)
    report = Report(options)
    width = options.width
    layers = torch.nn.Linear(width, 4 * width), torch.nn.GELU(), torch.nn.Linear(4 * width, width)
    network: torch.nn.Module = torch.nn.Sequential(*layers).cuda()
    if options.how == "ddp":
        network = DistributedDataParallel(network, device_ids=[options.rank])
    if options.how == "fsdp":
        halves = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
        for module in (layers[0], layers[2], network):
            fully_shard(module, mp_policy=halves)
    optimiser = torch.optim.AdamW(network.parameters(), lr=1e-3)
    generator = torch.Generator("cuda").manual_seed(2 + options.rank)
    if options.rank == 0:
        report.device(f"{torch.cuda.get_device_name()}, NCCL {torch.cuda.nccl.version()}, PyTorch {torch.__version__}")
    for _ in range(options.iterations):
        x = torch.randn(256, width, generator=generator, device="cuda")
        loss = (network(x) - x.roll(1, 1)).float().square().mean()
        optimiser.zero_grad()
        loss.backward()
        if options.how == "calls":
            for weight in network.parameters():
                ranks.all_reduce(weight.grad)
        optimiser.step()
        own = [weight.detach() for weight in network.parameters()]
        if options.how == "fsdp":
            own = [weight.to_local() for weight in own]
        words = torch.stack([weight.view(torch.int32).sum() for weight in own]).sum()
        if options.how == "fsdp":
            ranks.all_reduce(words)
        most, least = words.clone(), words.clone()
        ranks.all_reduce(most, ranks.ReduceOp.MAX)
        ranks.all_reduce(least, ranks.ReduceOp.MIN)
        if int(most) != int(least):
            raise SystemExit(f"rank {options.rank}: the ranks' weights differ")
        if options.rank == 0:
            report.step(int(words) & (1 << 63) - 1)
    if options.rank == 0:
        report.result()


def main() -> None:
    """Start the ranks, or be one."""
    options = parser("PyTorch and NCCL on two GPUs.", iterations=400)
    options.add_argument("--rank", type=int)
    options.add_argument("--how", choices=["calls", "ddp", "fsdp"], default="calls", help="(%(default)s)")
    options.add_argument(
        "--width", type=int, default=1024, help="of the network; weights and all take 128 times its square, in bytes"
    )
    chosen = options.parse_args()
    if chosen.rank is not None:
        train(chosen)
        return
    children = [subprocess.Popen([sys.executable, __file__, *sys.argv[1:], "--rank", str(rank)]) for rank in (0, 1)]
    raise SystemExit(max(child.wait() for child in children))


if __name__ == "__main__":
    main()

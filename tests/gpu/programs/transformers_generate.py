#!/usr/bin/env python3
"""Hugging Face's transformers: a Llama of random weights that answers prompts, with its cache kept between tokens."""

from __future__ import annotations

import os
import sys
from pathlib import Path

os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
os.environ["HF_HUB_OFFLINE"] = "1"

sys.path.insert(0, str(Path(__file__).resolve().parents[3] / "examples"))
import torch
from report import Report, parser
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    """Run the program."""
    options = parser("Answers of a Llama.", iterations=20, size=512, size_help="width")
    options.add_argument("--cache", choices=["dynamic", "static"], default="dynamic", help="(%(default)s)")
    chosen = options.parse_args()
    report = Report(chosen)
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=4096,
        hidden_size=chosen.size,
        intermediate_size=2 * chosen.size,
        num_hidden_layers=4,
        num_attention_heads=8,
        num_key_value_heads=2,
        max_position_embeddings=512,
        eos_token_id=None,
        pad_token_id=0,
    )
    model = LlamaForCausalLM(config).to("cuda", torch.bfloat16).eval()
    report.device(f"{torch.cuda.get_device_name()}, PyTorch {torch.__version__}")
    tokens = torch.arange(1, 17, device="cuda").reshape(2, 8)
    for _ in range(chosen.iterations):
        with torch.inference_mode():
            answer = model.generate(
                tokens,
                attention_mask=torch.ones_like(tokens),
                max_new_tokens=16,
                do_sample=True,
                top_k=50,
                cache_implementation=None if chosen.cache == "dynamic" else "static",
            )
        tokens = answer[:, -8:].clone()
        report.step(int((answer * torch.arange(1, answer.shape[1] + 1, device="cuda")).sum().item()))
    report.result()


if __name__ == "__main__":
    main()

"""The gated delta rule, forward and backward, against its recurrence, transformers' chunk function and softmax attention.

B = 1, 4 heads, K = V = 64, fp32, gates as Kimi Linear initialises them. Ratios above 1 mean ours is better:
``transformers_T`` (transformers.models.kimi_linear's chunk function, extra `hf`), ``recurrence_T`` (token by token),
``sdpa_T`` (causal scaled_dot_product_attention); ``flat_time`` and ``flat_memory`` compare time and peak memory a token
at the shortest length with those at the longest, memory in a fresh process per length; ``unbounded`` is the time with
gates as initialised over the time with strong unbounded decay (log decay down to -20 a step in every channel).
"""

from __future__ import annotations

import argparse
import resource
import subprocess
import sys
from pathlib import Path

import torch
import torch.nn.functional as F

from _measure import interleave, matmul_peak, report
from triscale.config import require
from triscale.ops import gated_delta_rule

HEADS, WIDTH = 4, 64


def inputs(tokens: int, decay: str = "initial") -> list[torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    q, k = (F.normalize(torch.randn(1, tokens, HEADS, WIDTH, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(1, tokens, HEADS, WIDTH, generator=generator)
    uniform = torch.rand(HEADS, WIDTH + 1, generator=generator)
    rate, dt = 1 + 15 * uniform[:, :1], 1e-3 * 100 ** uniform[:, 1:]
    bias = dt + (-torch.expm1(-dt)).log()
    noise = torch.randn(1, tokens, HEADS, WIDTH, generator=generator)
    g = -rate * F.softplus(bias + 0.02 * noise) if decay == "initial" else -20 * torch.rand(noise.shape)
    beta = torch.rand(1, tokens, HEADS, generator=generator)
    return [x.requires_grad_() for x in (q, k, v, g, beta)]


def training_step(function, leaves: list[torch.Tensor]):
    """Forward and backward with a fixed gradient of the output."""
    gradient = torch.ones(leaves[2].shape)
    return lambda: torch.autograd.grad(function(*leaves), leaves, gradient, allow_unused=True)


def ours(*leaves: torch.Tensor) -> torch.Tensor:
    return gated_delta_rule(*leaves)[0]


def softmax_attention(q, k, v, g, beta) -> torch.Tensor:
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    return F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2)


def recurrence(*leaves: torch.Tensor) -> torch.Tensor:
    return gated_delta_rule(*leaves, path="reference")[0]


def transformers_chunk():
    module = require(
        "transformers.models.kimi_linear.modeling_kimi_linear", "hf", "the transformers peer of this benchmark"
    )
    return lambda *leaves: module.chunk_kimi_delta_attention(*leaves)[0]


def peak_memory(tokens: int) -> float:
    """Peak resident bytes that a step over ``tokens`` adds, measured in a process of its own."""
    peaks = []
    for length in (64, tokens):
        out = subprocess.run([sys.executable, __file__, "--memory-of", str(length)], check=True, capture_output=True)
        peaks.append(int(out.stdout))
    return float(peaks[1] - peaks[0])


def memory_child(tokens: int, threads: int) -> None:
    torch.set_num_threads(threads)
    training_step(ours, inputs(64))()  # code and thread pools are loaded before anything is measured
    training_step(ours, inputs(tokens))()
    print(high_water())


def high_water() -> int:
    """Peak resident bytes of this process. getrusage also counts what the parent held when it started us."""
    try:
        lines = Path("/proc/self/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def forward_backward_flops(tokens: int, chunk: int = 32) -> int:
    """Floating-point operations of the matrix products actually taken, recomputation included: per head and chunk 18
    products of C x C x 64 and 10 of C x 64 x 64 (the triangular inverse, twice, is not counted)."""
    return 2 * (18 * chunk * chunk * WIDTH + 10 * chunk * WIDTH * WIDTH) * HEADS * (tokens // chunk)


def progress(medians: dict[str, float]) -> None:
    """Plain lines on stderr while the rest is measured."""
    for name, seconds in medians.items():
        print(f"  {name:<28} {seconds * 1e3:.1f} ms", file=sys.stderr, flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=7)
    parser.add_argument("--longest", type=int, default=131072, help="length of flat_time and flat_memory")
    parser.add_argument("--attention-longest", type=int, default=32768, help="longest length softmax attention runs")
    parser.add_argument("--memory-of", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.memory_of is not None:
        memory_child(options.memory_of, options.threads)
        return
    torch.set_num_threads(options.threads)
    medians: dict[str, float] = {}
    short = inputs(2048)
    medians |= interleave(
        {
            "ours_2048": training_step(ours, short),
            "sdpa_2048": training_step(softmax_attention, short),
            "ours_2048_unbounded": training_step(ours, inputs(2048, "strong")),
        },
        3 * options.repeats,
        warmup=2,
    )
    progress(medians)
    medians |= interleave(
        {
            "ours_2048_beside_slow": training_step(ours, short),
            "recurrence_2048": training_step(recurrence, short),
            "transformers_2048": training_step(transformers_chunk(), short),
        },
        3,
    )
    progress(medians)
    middle = inputs(4096)
    medians |= interleave(
        {"ours_4096": training_step(ours, middle), "sdpa_4096": training_step(softmax_attention, middle)},
        options.repeats,
    )
    long, name = inputs(options.attention_longest), options.attention_longest
    medians |= interleave(
        {f"ours_{name}": training_step(ours, long), f"sdpa_{name}": training_step(softmax_attention, long)}, 1, warmup=0
    )
    del long
    longest = inputs(options.longest)
    flat = interleave(
        {
            "ours_2048_beside_longest": training_step(ours, short),
            f"ours_{options.longest}": training_step(ours, longest),
        },
        3,
    )
    medians |= flat
    progress(flat)
    del longest
    memory = {length: peak_memory(length) / length for length in (2048, options.longest)}
    per_token = flat[f"ours_{options.longest}"] / options.longest
    ratios = {
        "transformers_2048": medians["transformers_2048"] / medians["ours_2048_beside_slow"],
        "recurrence_2048": medians["recurrence_2048"] / medians["ours_2048_beside_slow"],
        "sdpa_2048": medians["sdpa_2048"] / medians["ours_2048"],
        "sdpa_4096": medians["sdpa_4096"] / medians["ours_4096"],
        f"sdpa_{name}": medians[f"sdpa_{name}"] / medians[f"ours_{name}"],
        "flat_time": flat["ours_2048_beside_longest"] / 2048 / per_token,
        "flat_memory": memory[2048] / memory[options.longest],
        "unbounded": medians["ours_2048"] / medians["ours_2048_unbounded"],
    }
    peak = matmul_peak(torch.float32)
    meta = {
        "heads": HEADS, "key_width": WIDTH, "value_width": WIDTH, "dtype": "float32", "repeats": options.repeats,
        "matmul_peak_gflops": peak / 1e9,
        "fraction_of_peak": forward_backward_flops(2048) / medians["ours_2048"] / peak,
        "bytes_per_token_2048": memory[2048], f"bytes_per_token_{options.longest}": memory[options.longest],
    }  # fmt: skip
    report(meta, medians, ratios, options.json)


if __name__ == "__main__":
    main()

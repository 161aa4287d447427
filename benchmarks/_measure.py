"""Shared by all benchmarks: interleaved timing in one process, medians, and the printed object.

Every script prints ``{meta, medians, ratios}`` with ``--json``; a ratio above 1 means ours is better.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from collections.abc import Callable
from typing import Any


def arguments(description: str, **defaults: Any) -> argparse.Namespace:
    """``--json``, ``--threads`` and ``--repeats``; sets torch's thread count."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=defaults.get("repeats", 7))
    options = parser.parse_args()
    import torch

    torch.set_num_threads(options.threads)
    return options


def interleave(candidates: dict[str, Callable[[], Any]], repeats: int, warmup: int = 1) -> dict[str, float]:
    """Median seconds of each candidate, run in turn so that slow moments of the machine hit all alike."""
    times: dict[str, list[float]] = {name: [] for name in candidates}
    for round_number in range(warmup + repeats):
        for name, run in candidates.items():
            start = time.perf_counter()
            run()
            if round_number >= warmup:
                times[name].append(time.perf_counter() - start)
    return {name: statistics.median(values) for name, values in times.items()}


def compare(
    base: Callable[[], Any], ours: Callable[[], Any], repeats: int, warmup: int = 2
) -> tuple[float, float, list[float]]:
    """For small differences: median seconds of both, and the quartiles of ours / base over neighbouring pairs.

    A pair's two runs lie next to each other and take turns at going first, so drifts of the machine cancel in its ratio.
    """
    times: tuple[list[float], list[float]] = ([], [])
    for round_number in range(warmup + repeats):
        for place in (0, 1) if round_number % 2 else (1, 0):
            start = time.perf_counter()
            (base, ours)[place]()
            if round_number >= warmup:
                times[place].append(time.perf_counter() - start)
    ratios = [b / a for a, b in zip(*times, strict=True)]
    quartiles = statistics.quantiles(ratios, n=4, method="inclusive")
    return statistics.median(times[0]), statistics.median(times[1]), quartiles


def matmul_peak(dtype: Any, size: int = 1024, seconds: float = 1.0) -> float:
    """Measured FLOP/s of a large matrix product: the yardstick of utilisation."""
    import torch

    a = torch.randn(size, size).to(dtype)
    out = a @ a
    best, stop = float("inf"), time.perf_counter() + seconds
    while time.perf_counter() < stop:
        start = time.perf_counter()
        torch.mm(a, a, out=out)
        best = min(best, time.perf_counter() - start)
    return 2 * size**3 / best


def report(meta: dict[str, Any], medians: dict[str, float], ratios: dict[str, float], as_json: bool) -> None:
    """Print the object, or a readable table."""
    import torch

    meta = {
        "python": platform.python_version(), "torch": torch.__version__, "threads": torch.get_num_threads(),
        "cores": os.cpu_count(), **meta,
    }  # fmt: skip
    if as_json:
        print(json.dumps({"meta": meta, "medians": medians, "ratios": ratios}))
        return
    for title, values in (("meta", meta), ("medians", medians), ("ratios (above 1 = ours is better)", ratios)):
        print(title)
        for name, value in values.items():
            print(f"  {name:<28} {value:.6g}" if isinstance(value, float) else f"  {name:<28} {value}")

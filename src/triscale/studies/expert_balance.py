"""How many optimizer steps does a routing bias need to even out a skewed mixture of experts?

Router scores of a skewed model (each expert's logit has its own offset), a fresh batch each step: quantile balancing,
exact and from the histogram, against the sign update. Reported is the fullest expert's load over the mean. Even a
perfectly balanced router shows more than 1 on a fresh batch, because tokens are a sample.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triscale.config import require
from triscale.ops.routing import (
    bias_from_histogram,
    choose_experts,
    expert_load,
    quantile_bias,
    required_bias_histogram,
    sign_bias,
)

Rule = Callable[[Tensor, Tensor, Tensor], Tensor]  # scores, bias, load -> next bias


def run(
    output: Path,
    experts: int = 896,
    top_k: int = 16,
    tokens: int = 32768,
    quantile_steps: int = 8,
    sign_steps: int = 300,
    rate: float = 1e-3,
    skew: float = 0.5,
    bins: int = 1000,
    seed: int = 0,
) -> dict[str, Any]:
    """Run the rules and write results.json and max-load.svg into ``output``. skew: SD of the experts' offsets."""
    rules: dict[str, tuple[Rule, int]] = {
        "quantile, exact": (lambda scores, bias, load: quantile_bias(scores, bias, top_k), quantile_steps),
        "quantile, histogram": (
            lambda scores, bias, load: bias_from_histogram(
                required_bias_histogram(scores, bias, top_k, bins), bias, top_k
            ), quantile_steps,
        ),
        f"sign, rate {rate:g}": (
            lambda scores, bias, load: sign_bias(bias, load, rate),
            sign_steps,
        ),
    }  # fmt: skip
    results: dict[str, Any] = {"settings": {"experts": experts, "top_k": top_k, "tokens": tokens, "skew": skew,
                                            "seed": seed, "torch": torch.__version__}, "rules": {}}  # fmt: skip
    for name, (rule, steps) in rules.items():
        results["rules"][name] = curve = _follow(name, rule, steps, experts, top_k, tokens, skew, seed)
        below = next((i for i, value in enumerate(curve["fresh"]) if value < 1.3), None)
        print(f"{name:<22} start {curve['fresh'][0]:.2f}  same batch after one update {curve['same_after_one']:.3f}  "
              f"fresh batches below 1.3 after {below if below is not None else f'more than {steps}'} updates", flush=True)  # fmt: skip
    output.mkdir(parents=True, exist_ok=True)
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    _figure(results["rules"], output / "max-load.svg")
    return results


def _over_mean(load: Tensor) -> float:
    return float(load.max() / load.double().mean())


def _follow(
    name: str, rule: Rule, steps: int, experts: int, top_k: int, tokens: int, skew: float, seed: int
) -> dict[str, Any]:
    """fresh: max load of each step's batch before its update; same_after_one: of the first batch after one update."""
    generator = torch.Generator().manual_seed(seed)
    offsets = skew * torch.randn(experts, generator=generator)
    bias, fresh, same, last = torch.zeros(experts), [], 0.0, time.monotonic()
    for step in range(steps):
        scores = torch.sigmoid(torch.randn(tokens, experts, generator=generator).add_(offsets))
        load = expert_load(choose_experts(scores, bias, top_k), experts)
        fresh.append(_over_mean(load))
        bias = rule(scores, bias, load)
        if step == 0:
            same = _over_mean(expert_load(choose_experts(scores, bias, top_k), experts))
        if time.monotonic() - last > 10:
            print(f"  {name}: step {step + 1}/{steps}, max load {fresh[-1]:.2f}", flush=True)
            last = time.monotonic()
    return {"fresh": fresh, "same_after_one": same}


def _figure(rules: dict[str, Any], path: Path) -> None:
    plt = require("matplotlib.pyplot", "report", "the figure of this study")
    figure, axis = plt.subplots(figsize=(7, 4))
    for name, curve in rules.items():
        axis.plot(range(1, len(curve["fresh"]) + 1), curve["fresh"], label=name, marker="." if len(curve["fresh"]) < 20 else "")  # fmt: skip
    axis.axhline(1.3, color="grey", linestyle=":", label="1.3")
    axis.set(xscale="log", yscale="log", xlabel="optimizer step", ylabel="fullest expert / mean (fresh batch)")
    axis.legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)

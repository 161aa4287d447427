"""Do Attention Residuals help over recurrent layers too, and what do they cost?

Full, block and no Attention Residuals, crossed with pure softmax attention and the 3:1 delta hybrid, as two ladders
(each judged against its own plain-residual baseline) of matched parameters and equal tokens, paired seeds. Beside each
gain stand its costs: training time, peak memory of a training step, decode time. A figure shows the norms of hidden
states and of their gradients over depth.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triscale.config import ConfigError, from_dict, require, to_dict
from triscale.data.heldout import HeldoutRows
from triscale.ladder import tables
from triscale.ladder.config import LadderConfig
from triscale.ladder.run import LadderRunner
from triscale.ladder.verdict import LadderResult, analyse
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.train.config import Runtime
from triscale.train.evaluate import to_batch
from triscale.train.load import load_run
from triscale.train.progress import Progress

from .cost import ladder_cost
from .page import defaults

MIXERS: dict[str, dict[str, Any]] = {
    "attention": {"kind": "latent_attention", "heads": 4, "rope_theta": 10000.0},
    "hybrid": {
        "kind": "hybrid",
        "pattern": "3:1",
        "linear": {"kind": "delta_attention", "heads": 4},
        "full": {"kind": "latent_attention", "heads": 4},
    },
}


def arms(block: int) -> dict[str, dict[str, Any]]:
    return {
        "none": {"kind": "standard"},
        "block": {"kind": "block_attention", "block": block},
        "full": {"kind": "attention"},
    }


def run(
    output: Path,
    width: int = 128,
    depth: int = 8,
    tokens: int = 1_000_000,
    seeds: Any = (0, 1, 2),
    block: int = 4,
    rate: float = 1.6e-2,
    optimizer: str = "muonclip",
    batch_tokens: int = 4096,
    row_length: int = 256,
    vocabulary: int = 2048,
    eval_tokens: int = 65536,
    budgets: Any = (1.0, 2.0),
    corpus: Any = "python",
    threads: int = 0,
) -> dict[str, Any]:
    """Run (or resume) both ladders below ``output`` and write results.json, README.md and depth.svg there.

    ``rate`` is shared by all arms: learning rates tuned per arm come from ``triscale ladder tune`` on the written
    ladder.json. ``budgets`` are multiples of ``tokens`` at which the baseline is also measured, for the multiplier.
    """
    settings = {name: value for name, value in locals().items() if name != "output"}
    output.mkdir(parents=True, exist_ok=True)
    runtime = Runtime(threads=threads)
    results: dict[str, Any] = {"settings": {**settings, "seeds": list(seeds), "budgets": list(budgets)}, "mixers": {}}
    texts, profiles = [], {}
    for mixer in MIXERS:
        ladder = _ladder(mixer, settings)
        runner = LadderRunner(ladder, output / mixer, runtime)
        with Progress() as progress:
            result = analyse(runner.run(progress))
        costs = {arm.name: measure_costs(runner.matched(ladder.rungs[0], arm).model, row_length, batch_tokens)
                 for arm in ladder.arms}  # fmt: skip
        loaded = {arm.name: load_run(output / mixer / "size" / arm.name / f"seed{seeds[0]}") for arm in ladder.arms}
        heldout = HeldoutRows(runner.data(ladder.rungs[0], ladder.baseline), row_length, max_rows=4)
        batch = to_batch(next(heldout.batches(4)), torch.device("cpu"))
        profiles[mixer] = {name: depth_profile(item.model.cpu(), batch) for name, item in loaded.items()}
        results["mixers"][mixer] = {"ladder": to_dict(ladder), "costs": costs, "profile": profiles[mixer],
                                    "arms": _summary(result)}  # fmt: skip
        texts.append(_text(mixer, result, costs))
    (output / "results.json").write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    readme = "\n\n".join([(__doc__ or "").strip(), *texts, "![Norms over depth](depth.svg)"])
    (output / "README.md").write_text(readme + "\n", encoding="utf-8")
    _figure(profiles, output / "depth.svg")
    print("\n\n".join(texts))
    return results


def plan(**settings: Any) -> str:
    """What :func:`run` with these settings would cost."""
    chosen = defaults(run) | settings
    return ladder_cost([_ladder(mixer, chosen) for mixer in MIXERS], Runtime(threads=chosen["threads"]))


def _ladder(mixer: str, s: dict[str, Any]) -> LadderConfig:
    if s["depth"] % 4:
        raise ConfigError("depth", f"{s['depth']} does not hold whole 3:1 groups", "Use a multiple of 4")
    model = {"width": s["width"], "depth": s["depth"], "mixer": MIXERS[mixer], "residual": {"kind": "standard"}}
    train = {"batch_tokens": s["batch_tokens"], "row_length": s["row_length"], "micro_batch_tokens": s["batch_tokens"],
             "eval_tokens": s["eval_tokens"]}  # fmt: skip
    data = {"corpus": s["corpus"], "vocabulary_size": s["vocabulary"]}
    return from_dict(
        LadderConfig,
        {
            "name": f"attnres-{mixer}",
            "seeds": list(s["seeds"]),
            "base": {"data": data, "model": model, "train": train, "schedule": {"kind": "wsd"},
                     "optimizer": {"kind": s["optimizer"], "lr": s["rate"]}},
            "rungs": [{"name": "size", "tokens": s["tokens"], "match": "parameters", "budgets": list(s["budgets"])}],
            "arms": [{"name": name, "config": {"model": {"residual": part}}} for name, part in arms(s["block"]).items()],
        },
        "study",
    )  # fmt: skip


def measure_costs(config: Decoder.Config, row_length: int, batch_tokens: int, repeats: int = 3) -> dict[str, float]:
    """Median seconds of a training step and of a decoded token, FLOPs, and bytes kept for backward, of one model."""
    model = config.build(seed=0).train()
    tokens = torch.randint(0, config.vocabulary or 1, (max(1, batch_tokens // row_length), row_length))
    batch = TokenBatch.from_rows(tokens, None, tokens.roll(-1, 1), torch.ones(tokens.shape))
    kept: dict[int, int] = {}

    def pack(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch).backward()
    parameters = {p.untyped_storage().data_ptr() for p in model.parameters()}
    return {
        "parameters": sum(p.numel() for p in model.parameters()),
        "flops_per_token": model.flops_per_token(row_length),
        "bytes_kept_for_backward": sum(size for address, size in kept.items() if address not in parameters),
        "training_seconds": _median(lambda: model(batch).backward(), repeats),
        "decode_seconds": _median(_decoder(model.eval()), repeats),
    }


def _decoder(model: Decoder, steps: int = 8) -> Callable[[], None]:
    @torch.inference_mode()
    def decode() -> None:
        cache = model.new_cache(1, steps + 1)
        for _ in range(steps):
            batch = cache.batch([[0]], [0])
            model(batch, cache, "last_logits")
            cache.advance(batch)

    return decode


def _median(run: Callable[[], Any], repeats: int) -> float:
    times = []
    for _ in range(repeats + 1):
        start = time.perf_counter()
        run()
        times.append(time.perf_counter() - start)
    return sorted(times[1:])[repeats // 2]


def depth_profile(model: Decoder, batch: TokenBatch) -> dict[str, list[float]]:
    """RMS of every sublayer's output, of the state it joins, and of the loss's gradient on the output, over ``batch``.

    outputs, states, gradients: one number per sublayer (mixer, feed-forward, mixer, ...), mean over tokens; gradients
    are of the summed loss. The state is the residual stream, or with Attention Residuals the open block's sum.
    """
    outputs: list[Tensor] = []
    states: list[float] = []
    watching: list[Any] = []
    layers: list[Any] = list(model.layers)
    for layer in layers:
        for connection in (layer.mixer_residual, layer.feed_forward_residual):
            write = connection.write

            def watched(state: Any, output: Tensor, write: Any = write) -> Any:
                output.retain_grad()
                outputs.append(output)
                new = write(state, output)
                states.append(_rms(new.partial if hasattr(new, "partial") else new))
                return new

            watching.append(connection)
            connection.write = watched
    try:
        model(batch, output="loss").backward()
    finally:
        for connection in watching:
            del connection.write
        model.zero_grad(set_to_none=True)
    gradients = [_rms(output.grad) if output.grad is not None else 0.0 for output in outputs]
    return {"outputs": [_rms(output) for output in outputs], "states": states, "gradients": gradients}


def _rms(value: Tensor) -> float:
    return float(value.detach().float().square().mean(-1).sqrt().mean())


def _summary(result: LadderResult) -> dict[str, Any]:
    return {
        arm.name: {
            "verdict": arm.verdict,
            "difference": tables.difference_text(arm.pooled),
            "token_multiplier": tables.factor_text(arm.multipliers["tokens"], arm.extrapolated),
            "seconds_multiplier": tables.factor_text(arm.multipliers["seconds"], arm.extrapolated),
            "n": arm.n,
        }
        for arm in result.arms
    }


def _text(mixer: str, result: LadderResult, costs: dict[str, dict[str, float]]) -> str:
    """One Markdown table: gain and cost of each arm over the plain residual."""
    plain = costs["none"]
    lines = [f"## {mixer}", "", "| residual | loss difference | tokens worth | verdict | step time | decode time |"
             " kept for backward |", "|---|---|---|---|---|---|---|"]  # fmt: skip
    for arm in result.arms:
        own = costs[arm.name]
        ratio = lambda key, own=own: f"x{own[key] / plain[key]:.2f}"
        lines.append(
            f"| {arm.name} | {tables.difference_text(arm.pooled)} | {tables.factor_text(arm.multipliers['tokens'])} | "
            f"{tables.verdict_text(arm)} | {ratio('training_seconds')} | {ratio('decode_seconds')} | "
            f"{ratio('bytes_kept_for_backward')} |"
        )
    return "\n".join(lines)


def _figure(profiles: dict[str, dict[str, dict[str, list[float]]]], path: Path) -> None:
    plt = require("matplotlib.pyplot", "report", "the figure of this study")
    rows = {"outputs": "RMS of a sublayer's output", "states": "RMS of the state it joins",
            "gradients": "RMS of the output's gradient"}  # fmt: skip
    figure, axes = plt.subplots(len(rows), len(profiles), figsize=(9, 8), sharex=True, squeeze=False)
    for column, (mixer, profile) in enumerate(profiles.items()):
        for line, (key, title) in enumerate(rows.items()):
            axis = axes[line][column]
            for name, values in profile.items():
                axis.plot(range(1, len(values[key]) + 1), values[key], marker=".", label=name)
            axis.set(title=f"{mixer}: {title}", yscale="log")
            axis.grid(alpha=0.25)
        axes[-1][column].set_xlabel("sublayer")
    axes[0][0].legend(frameon=False)
    figure.tight_layout()
    figure.savefig(path)
    plt.close(figure)

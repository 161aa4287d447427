"""``triscale study qk-clip``: does QK-Clip hold growing attention logits, and does it cost retrieval?

Part 1, growth: a plain transformer without QK-norm under Muon, at an ordinary and at a high learning rate, with and
without the clip, several seeds: the largest logit of each step, spikes, divergence, and the loss curves.
Part 2, retrieval: a two-layer model learns to find a value by its key among distractors (a needle task in tokens);
the threshold is swept, and accuracy is read by distance.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triscale.config import ConfigError, from_dict, overlay
from triscale.data.prepare import prepare
from triscale.events import current_events
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.optim import MuonClip
from triscale.train.config import RunConfig, Runtime
from triscale.train.divergence import DivergedError
from triscale.train.loop import Trainer
from triscale.train.progress import Progress
from triscale.train.run_directory import write_json

BASE: dict[str, Any] = {
    "data": {"corpus": {"kind": "python"}, "vocabulary_size": 2048},
    "model": {"width": 128, "depth": 4, "mixer": {"kind": "grouped_query_attention", "heads": 4}},
    "schedule": {"kind": "wsd", "warmup_length": 10, "decay": 0.25},
    "train": {"batch_tokens": 4096, "row_length": 256, "micro_batch_tokens": 4096, "eval_tokens": 32768},
}
PAIRS = 64  # keys and as many values


def run(
    output: Path,
    *,
    seeds: list[int] | None = None,
    rates: list[float] | None = None,
    threshold: float = 30.0,
    tokens: int = 600_000,
    thresholds: list[float] | None = None,
    retrieval_steps: int = 600,
    retrieval_length: int = 128,
    base: dict[str, Any] | None = None,
    runtime: dict[str, Any] | None = None,
) -> dict[str, Any]:
    """Run both parts (what is already there is read back) and write ``study.json``; prints two tables.

    thresholds: of part 2, 0 = no clip. tokens: training budget of each run of part 1. base: overrides of its runs.
    runtime: device, threads, cache and the like.
    """
    if threshold <= 0:
        raise ConfigError("threshold", f"{threshold} must be positive")
    seeds, rates = seeds or [0, 1, 2], rates or [4e-3, 3.2e-2]
    sweep = [0.0, 100.0, 30.0, 10.0, 3.0] if thresholds is None else thresholds
    with Progress("qk-clip:") as progress:
        machine = from_dict(Runtime, {"checkpoint_seconds": 60.0, **(runtime or {})}, "runtime")
        growth = _growth(output, seeds, rates, threshold, tokens, base or {}, machine, progress)
        retrieval = _retrieval(output, seeds, sweep, retrieval_steps, retrieval_length, progress)
    study = {"threshold": threshold, "growth": growth, "retrieval": retrieval}
    write_json(output / "study.json", study)
    print(growth_table(growth), "", retrieval_table(retrieval), sep="\n")
    return study


def _growth(
    output: Path, seeds: list[int], rates: list[float], threshold: float, tokens: int, base: dict[str, Any],
    runtime: Runtime, progress: Progress,
) -> list[dict[str, Any]]:  # fmt: skip
    results = []
    for rate in rates:
        for name, limit in (("muon", 1e9), ("muonclip", threshold)):  # 1e9: every step is measured, none is clipped
            for seed in seeds:
                folder = output / f"growth_lr{rate:g}_{name}_seed{seed}"
                progress.title = folder.name
                optimizer = {"kind": "muonclip", "lr": rate, "qk_clip_threshold": limit}
                changes = {"seed": seed, "optimizer": optimizer, "train": {"tokens": tokens}}
                config = from_dict(RunConfig, overlay(overlay(BASE, base), changes), "qk-clip")
                results.append({"rate": rate, "arm": name, "seed": seed, **_one_run(config, runtime, folder, progress)})
    return results


def _one_run(config: RunConfig, runtime: Runtime, folder: Path, progress: Progress) -> dict[str, Any]:
    data = prepare(config.data, runtime.cache_dir, progress.preparing)
    trainer = Trainer(config, runtime, folder, listeners=(progress,), prepared=data)
    try:
        result = trainer.train()
    except DivergedError as error:
        result = {"loss": None, "spikes": trainer.sentinel.spikes, "diverged_at": error.step}
    events = current_events(folder / "events.jsonl")
    logits = [(e.data["step"], _peak(e.data["max_logits"])) for e in events if e.kind == "logits"]
    return {
        "loss": result["loss"], "spikes": result["spikes"], "diverged_at": result.get("diverged_at"),
        "clipped_heads": max((e.data["clipped"] for e in events if e.kind == "logits"), default=0),
        "max_logit": max((v for _, v in logits), default=None), "last_logit": logits[-1][1] if logits else None,
        "max_logit_curve": logits, "loss_curve": [(e.data["step"], e.data["loss"]) for e in events if e.kind == "step"],
    }  # fmt: skip


def _peak(layers: dict[str, list[Any]]) -> float:
    return max(float(value) for heads in layers.values() for value in heads)


def growth_table(rows: list[dict[str, Any]]) -> str:
    """One line a run: the largest logit of the run and of its last step, clipped heads, spikes, final loss."""
    lines = ["lr      arm       seed  max logit  at end     clips   spikes  held-out loss"]
    for row in rows:
        end = f"diverged at step {row['diverged_at']}" if row["loss"] is None else f"{row['loss']:.4f}"
        lines.append(f"{row['rate']:<7g} {row['arm']:<9} {row['seed']:<5} {row['max_logit']:<10.4g} "
                     f"{row['last_logit']:<10.4g} {row['clipped_heads']:<7} {row['spikes']:<7} {end}")  # fmt: skip
    return "\n".join(lines)


# -- retrieval ---------------------------------------------------------------------------------------------------------


def retrieval_batch(rows: int, length: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [rows, length] (length even) and answers [rows].

    A row is (length - 2) / 2 pairs of key and value, a filler token, and one of its keys again: the question. A key
    that comes twice, beyond PAIRS pairs, has the same value.
    """
    pairs = (length - 2) // 2
    keys = torch.rand(rows, PAIRS, generator=generator).argsort(1)
    keys = keys.repeat(1, -(-pairs // PAIRS))[:, :pairs]
    values = PAIRS + torch.randint(PAIRS, (rows, PAIRS), generator=generator)
    paired = values.gather(1, keys)
    asked = torch.randint(pairs, (rows, 1), generator=generator)
    body = torch.stack((keys, paired), 2).flatten(1)
    filler = torch.full((rows, 1), 2 * PAIRS)
    return torch.cat((body, filler, keys.gather(1, asked)), 1), paired.gather(1, asked).squeeze(1)


def _retrieval(
    output: Path, seeds: list[int], thresholds: list[float], steps: int, length: int, progress: Progress
) -> list[dict[str, Any]]:
    results = []
    for threshold in thresholds:
        for seed in seeds:
            file = output / "retrieval" / f"tau{threshold:g}_seed{seed}_steps{steps}_length{length}.json"
            if not file.exists():
                progress.note(f"retrieval, threshold {threshold or 'off'}, seed {seed}")
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, train_retrieval(threshold, seed, steps, length))
            results.append({"threshold": threshold, "seed": seed, **json.loads(file.read_text())})
    return results


def train_retrieval(threshold: float, seed: int, steps: int, length: int, rate: float = 4e-3) -> dict[str, Any]:
    """Train the two-layer model and return its accuracy, its largest logit, and how often heads were clipped."""
    mixer = {"kind": "grouped_query_attention", "heads": 4}
    config = from_dict(Decoder.Config, {"width": 64, "depth": 2, "vocabulary": 2 * PAIRS + 1, "mixer": mixer})
    model = config.build(seed=seed).train()
    optimizer = MuonClip(model, lr=rate, qk_clip_threshold=threshold or 1e9)
    generator = torch.Generator().manual_seed(seed)
    largest, clipped = 0.0, 0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = rate * min(1.0, (step + 1) / 20) * min(1.0, 4 * (steps - step) / steps)
        tokens, answers = retrieval_batch(32, length, generator)
        loss = model(_asked(tokens, answers)) / len(answers)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        assert optimizer.clip_report is not None
        largest = max(largest, _peak(optimizer.clip_report.max_logits))
        clipped += optimizer.clip_report.clipped
    return {"accuracy": accuracy(model, length, seed + 10_000), "max_logit": largest, "clipped_heads": clipped}


def _asked(tokens: Tensor, answers: Tensor) -> TokenBatch:
    """A batch whose only target is the answer, after the question at the end of each row."""
    targets, weights = torch.zeros_like(tokens), torch.zeros(tokens.shape)
    targets[:, -1], weights[:, -1] = answers, 1.0
    return TokenBatch.from_rows(tokens, None, targets, weights)


@torch.no_grad()
def accuracy(model: Decoder, length: int, seed: int, rows: int = 512) -> float:
    """Share of held-out questions whose likeliest value is the answer (chance: 1 / PAIRS)."""
    tokens, answers = retrieval_batch(rows, length, torch.Generator().manual_seed(seed))
    model.eval()
    logits = model(TokenBatch.from_rows(tokens), output="last_logits")
    return (logits[:, PAIRS : 2 * PAIRS].argmax(-1) + PAIRS == answers).float().mean().item()


def retrieval_table(rows: list[dict[str, Any]]) -> str:
    """One line a threshold: accuracy of every seed, and what the clip did."""
    lines = ["threshold  accuracy by seed          max logit  clips"]
    for threshold in dict.fromkeys(row["threshold"] for row in rows):
        group = [row for row in rows if row["threshold"] == threshold]
        scores = " ".join(f"{row['accuracy']:.3f}" for row in group)
        lines.append(f"{threshold or 'off':<10} {scores:<25} {max(r['max_logit'] for r in group):<10.4g} "
                     f"{sum(r['clipped_heads'] for r in group)}")  # fmt: skip
    return "\n".join(lines)

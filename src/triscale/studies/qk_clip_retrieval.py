"""The retrieval part of ``triscale study qk-clip``: many facts, all of them asked for, under a bound on the logits.

A fact is one token that says "name n has value v"; a question is a token that says "name n?". To answer among n facts,
softmax must put most of its weight on one token of n, which takes logits that exceed the others by several ln n.
"""

from __future__ import annotations

import itertools
import json
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from triscale.config import from_dict
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.optim import MuonClip
from triscale.train.interrupt import InterruptGuard
from triscale.train.progress import Progress
from triscale.train.run_directory import write_json

NAMES, VALUES = 64, 8
QUESTION, ANSWER = NAMES * VALUES, NAMES * VALUES + NAMES  # the first question token, the first answer
VOCABULARY = ANSWER + VALUES
ROWS, RATE, WARMUP = 32, 2e-2, 20
MODEL = {"width": 64, "depth": 2, "vocabulary": VOCABULARY, "mixer": {"kind": "grouped_query_attention", "heads": 2}}


def rows(count: int, facts: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Tokens [count, 2 facts] and answers [count, facts]: the facts in random order, then every question in another."""
    names = torch.rand(count, NAMES, generator=generator).argsort(1)[:, :facts]
    values = torch.randint(VALUES, (count, facts), generator=generator)
    asked = torch.rand(count, facts, generator=generator).argsort(1)
    tokens = torch.cat((names * VALUES + values, QUESTION + names.gather(1, asked)), 1)
    return tokens, ANSWER + values.gather(1, asked)


def distances(tokens: Tensor) -> Tensor:
    """Tokens between each question and its fact, [count, facts]."""
    facts = tokens.shape[1] // 2
    told, asked = tokens[:, :facts] // VALUES, tokens[:, facts:] - QUESTION
    place = (told[:, None, :] == asked[:, :, None]).int().argmax(2)
    return torch.arange(facts, 2 * facts) - place


def sweep(
    folder: Path, seeds: Any, thresholds: Any, steps: int, facts: int, progress: Progress
) -> list[dict[str, Any]]:
    """One row a threshold and seed; finished ones are read back, Ctrl-C loses at most the one under way."""
    if not 1 <= facts <= NAMES:
        raise ValueError(f"retrieval_facts: {facts} must lie between 1 and {NAMES}")
    cells = [(threshold, seed) for threshold in thresholds for seed in seeds]
    results = []
    with InterruptGuard("stopping: finished runs are kept (press again to exit at once)") as guard:
        for number, (threshold, seed) in enumerate(cells, 1):
            file = folder / "retrieval" / f"tau{threshold:g}_seed{seed}_steps{steps}_facts{facts}.json"
            if not file.exists():
                progress.title = f"[{number}/{len(cells)}] retrieval, threshold {threshold or 'off'}, seed {seed}:"
                file.parent.mkdir(parents=True, exist_ok=True)
                write_json(file, train(threshold, seed, steps, facts, progress, guard))
            results.append({"threshold": threshold, "seed": seed, **json.loads(file.read_text())})
    return results


def train(
    threshold: float,
    seed: int,
    steps: int,
    facts: int,
    progress: Progress | None = None,
    guard: InterruptGuard | None = None,
) -> dict[str, Any]:
    """Train the two-layer model; its accuracy by distance and by number of facts, its logits, and what was clipped."""
    model = from_dict(Decoder.Config, MODEL).build(seed=seed).train()
    optimizer = MuonClip(model, lr=RATE, qk_clip_threshold=threshold or 1e9)
    generator = torch.Generator().manual_seed(seed)
    largest, clipped = 0.0, 0
    for step in range(steps):
        if guard is not None:
            guard.check()
        for group in optimizer.param_groups:
            group["lr"] = RATE * min(1.0, (step + 1) / WARMUP) * min(1.0, 4 * (steps - step) / steps)
        loss = _one_step(model, optimizer, *rows(ROWS, facts, generator))
        report = optimizer.clip_report
        assert report is not None
        peak = max(value for heads in report.max_logits.values() for value in heads)
        largest, clipped = max(largest, peak), clipped + report.clipped
        if progress is not None:
            progress.status(f"{progress.title} step {step + 1}/{steps}  loss {loss:.3f}  max logit {peak:.1f}")
    generator = torch.Generator().manual_seed(seed + 10_000)
    near = {str(n): accuracy(model, n, generator)["all"] for n in sorted({max(1, facts // 4), max(1, facts // 2)})}
    full = accuracy(model, facts, generator)
    return {"accuracy": full["all"], "by_distance": full["by_distance"], "by_facts": {**near, str(facts): full["all"]},
            "max_logit": largest, "clipped_heads": clipped}  # fmt: skip


def _one_step(model: Decoder, optimizer: MuonClip, tokens: Tensor, answers: Tensor) -> float:
    facts = answers.shape[1]
    targets, weights = torch.zeros_like(tokens), torch.zeros(tokens.shape)
    targets[:, facts:], weights[:, facts:] = answers, 1.0
    loss = model(TokenBatch.from_rows(tokens, None, targets, weights)) / answers.numel()
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    return loss.item()


@torch.no_grad()
def accuracy(model: Decoder, facts: int, generator: torch.Generator, count: int = 128) -> dict[str, Any]:
    """Share of questions whose likeliest value is right (chance: 1 / VALUES), over all and by quarter of the distance."""
    tokens, answers = rows(count, facts, generator)
    model.eval()
    logits = model(TokenBatch.from_rows(tokens), output="logits").reshape(count, 2 * facts, VOCABULARY)
    right = (logits[:, facts:, ANSWER:].argmax(-1) + ANSWER == answers).float()
    far = distances(tokens)
    edges = [round(i * 2 * facts / 4) for i in range(5)]
    bins = {}
    for low, high in itertools.pairwise(edges):
        inside = (far > low) & (far <= high)
        if inside.any():
            bins[f"{low + 1} to {high}"] = right[inside].mean().item()
    return {"all": right.mean().item(), "by_distance": bins}


def step_seconds(facts: int, repeats: int = 3) -> float:
    """Seconds of one training step (the fastest of a few)."""
    model = from_dict(Decoder.Config, MODEL).build(seed=0).train()
    optimizer = MuonClip(model, lr=RATE, qk_clip_threshold=1e9)
    generator, times = torch.Generator().manual_seed(0), []
    for _ in range(repeats):
        start = time.perf_counter()
        _one_step(model, optimizer, *rows(ROWS, facts, generator))
        times.append(time.perf_counter() - start)
    return min(times)

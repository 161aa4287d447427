"""What a run will cost, before it starts: ``--dry-run``."""

from __future__ import annotations

import time
from dataclasses import dataclass, replace
from typing import Any

import torch

from triscale.models import count_parameters
from triscale.nn.batch import TokenBatch

from .config import RunConfig, Runtime
from .device import resolve_device, resolve_precision
from .evaluate import autocast

TRIAL_PARAMETERS = 200_000_000  # above this a trial step would itself take long: estimate instead
ASSUMED_UTILISATION = 0.3


@dataclass(frozen=True)
class Plan:
    """tokens and FLOPs are exact; memory and minutes are estimates."""

    parameters: dict[str, int]
    tokens: int
    steps: int
    flops: int
    memory_bytes: int
    minutes: float
    measured: bool

    def lines(self) -> list[str]:
        from .progress import short_number

        how = "measured on one micro-batch" if self.measured else f"assuming {ASSUMED_UTILISATION:.0%} of the peak"
        return [
            f"parameters  {self.parameters['total']:,} ({self.parameters['non_embedding']:,} without embeddings)",
            f"tokens      {self.tokens:,} in {self.steps:,} steps",
            f"FLOPs       {short_number(self.flops)}",
            f"memory      about {self.memory_bytes / 2**30:.2f} GiB",
            f"time        about {self.minutes:.1f} minutes ({how})",
        ]

    def to_dict(self) -> dict[str, Any]:
        return self.__dict__.copy()


def plan(config: RunConfig, runtime: Runtime) -> Plan:
    """Count and time a run without training it; needs no data."""
    device = resolve_device(runtime.device)
    if runtime.threads:
        torch.set_num_threads(runtime.threads)
    if config.model.vocabulary is None:
        config = replace(config, model=replace(config.model, vocabulary=config.data.vocabulary_size))
    train = config.train
    shape = config.model.build(seed=None, device="meta")
    counts = count_parameters(shape)
    flops = 3 * shape.flops_per_token(train.row_length) * train.batch_tokens * train.steps
    measured = counts["total"] <= TRIAL_PARAMETERS
    rate = _trial_rate(config, device) if measured else None
    if rate is None:
        from .device import matmul_peak

        seconds = flops / (ASSUMED_UTILISATION * matmul_peak(device, resolve_precision(train.precision, device)))
    else:
        seconds = train.steps * train.batch_tokens / rate
    micro = min(train.micro_rows, train.rows) * train.row_length
    layers = 1 if config.model.checkpoint_activations else config.model.depth
    activations = micro * config.model.width * 4 * (34 * layers + 2 * config.model.depth)
    memory = 16 * counts["total"] + activations + (200 << 20)
    return Plan(counts, train.steps * train.batch_tokens, train.steps, flops, memory, seconds / 60, measured)


def _trial_rate(config: RunConfig, device: torch.device) -> float:
    """Tokens a second of forward, backward and optimizer on random tokens (the second of two steps counts)."""
    train = config.train
    model = config.model.build(seed=0, device=device).train()
    optimizer = config.optimizer.build(model)
    precision = resolve_precision(train.precision, device)
    rows = min(train.micro_rows, train.rows)
    tokens = torch.randint(0, config.model.vocabulary or 2, (rows, train.row_length), device=device)
    weights = torch.ones(tokens.shape, device=device)
    forward_seconds = step_seconds = 0.0
    for _ in range(2):
        start = time.perf_counter()
        with autocast(device, precision):
            loss = model(TokenBatch.from_rows(tokens, None, tokens, weights)) / tokens.numel()
        loss.backward()
        float(loss.detach())
        forward_seconds = time.perf_counter() - start
        start = time.perf_counter()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        step_seconds = time.perf_counter() - start
    micro_batches = -(-train.rows // rows)
    return train.batch_tokens / (forward_seconds * micro_batches + step_seconds)

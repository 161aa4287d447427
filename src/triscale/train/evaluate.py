"""Held-out loss in nats a token and bits a byte."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext

import torch

from triscale.data.heldout import HeldoutRows, bits_per_byte
from triscale.data.prepare import PreparedData
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch


def corpus_name(data: PreparedData) -> str:
    """Which text and which token ids a loss belongs to, short."""
    return f"{data.report.corpus_hash[:16]}-{data.report.tokenizer_hash[:8]}"


def autocast(device: torch.device, dtype: torch.dtype):
    """Autocast to ``dtype``, or nothing for fp32."""
    return nullcontext() if dtype == torch.float32 else torch.autocast(device.type, dtype=dtype)


def to_batch(rows, device: torch.device, part: slice = slice(None)) -> TokenBatch:
    """A loader's rows (or some of them) as one flat batch on ``device``."""
    batch = TokenBatch.from_rows(
        torch.from_numpy(rows.tokens[part]),
        rows.boundaries[part],
        torch.from_numpy(rows.targets[part]),
        torch.from_numpy(rows.weights[part]),
    )
    return batch if device.type == "cpu" else batch.to(device)


@torch.no_grad()
def heldout_loss(
    model: Decoder,
    heldout: HeldoutRows,
    micro_rows: int,
    precision: torch.dtype,
    check: Callable[[], None] = lambda: None,
) -> dict[str, float]:
    """``loss`` (nats a token), ``bits_per_byte`` and ``tokens`` over ``heldout``; the model's mode is restored.

    check: called before every batch; what it raises ends the evaluation.
    """
    device = next(model.parameters()).device
    training = model.training
    model.eval()
    total = 0.0
    try:
        for rows in heldout.batches(micro_rows):
            check()
            with autocast(device, precision):
                total += float(model(to_batch(rows, device), output="loss"))
    finally:
        model.train(training)
    return {
        "loss": total / heldout.tokens,
        "bits_per_byte": bits_per_byte(total, max(heldout.bytes, 1)),
        "tokens": heldout.tokens,
    }

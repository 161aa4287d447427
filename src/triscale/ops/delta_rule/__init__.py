"""The gated delta rule (Kimi Delta Attention, Gated DeltaNet, delta rule): definition, fast paths and dispatch."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import torch


def backend_report(device: torch.device) -> dict[str, str]:
    """Which path serves the gated delta rule on ``device``, and why flash-linear-attention declines if it does."""
    import torch

    from .flash_linear_attention import why_not
    from .inputs import normalise

    probe = torch.zeros(1, 64, 1, 64, device=device)
    reason = why_not(normalise(probe, probe, probe, probe, probe[..., 0], None, None, None), 64)
    return {
        "gated delta rule": "flash-linear-attention" if reason is None else "torch, chunked",
        "flash-linear-attention": "used" if reason is None else f"declines: {reason}",
    }

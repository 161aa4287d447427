"""Parameter counts by component: the numbers plans, tables and matched arms are built on."""

from __future__ import annotations

from torch import nn


def count_parameters(model: nn.Module) -> dict[str, int]:
    """``total`` (each tensor once), ``embedding``, ``head`` (0 when tied), ``non_embedding`` and ``active``.

    active: parameters that take part in one token's computation; a mixture of experts says so itself through
    ``inactive_parameters()``.
    """
    total = sum(p.numel() for p in model.parameters())
    embedding = sum(p.numel() for n, p in model.named_parameters() if n == "embedding.weight")
    head = sum(p.numel() for n, p in model.named_parameters() if n == "head.weight")
    idle = sum(getattr(m, "inactive_parameters", lambda: 0)() for m in model.modules())
    return {
        "total": total,
        "embedding": embedding,
        "head": head,
        "non_embedding": total - embedding - head,
        "active": total - idle,
    }

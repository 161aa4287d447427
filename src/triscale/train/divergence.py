"""When the loss stops being a number: find out where, and say so."""

from __future__ import annotations

import torch
from torch import nn

from triscale.config import TriScaleError
from triscale.nn.batch import TokenBatch


class DivergedError(TriScaleError):
    """Loss, gradient or held-out loss became NaN or infinite. step: steps completed before; documents, activation:
    what was read and where the numbers grew."""

    def __init__(self, what: str, step: int, documents: list[str], activation: str):
        self.step, self.documents, self.activation = step, documents, activation
        shown = ", ".join(documents[:4]) + (f" and {len(documents) - 4} more" if len(documents) > 4 else "")
        read = f" (documents: {shown})" if documents else ""
        super().__init__(
            f"the {what} is not finite after {step} completed steps{read}; {activation}. Start a new run with a lower "
            "--optimizer.lr, a longer warm-up, or --train.precision=fp32"
        )


@torch.no_grad()
def largest_activation(model: nn.Module, batch: TokenBatch) -> str:
    """Run one forward pass and name the module with the first non-finite, or else the largest, output."""
    largest, where, broken = 0.0, "nothing", ""

    def watch(name: str):
        def hook(module: nn.Module, inputs: object, result: object) -> None:
            nonlocal largest, where, broken
            if not isinstance(result, torch.Tensor) or not result.is_floating_point() or not result.numel():
                return
            peak = float(result.abs().max())
            if not peak < float("inf"):
                broken = broken or name
            elif peak > largest:
                largest, where = peak, name

        return hook

    handles = [m.register_forward_hook(watch(n)) for n, m in model.named_modules() if n and not list(m.children())]
    try:
        model(batch)
    finally:
        for handle in handles:
            handle.remove()
    text = f"largest activation {largest:.3g} after {where}"
    return f"{text}, first non-finite output after {broken}" if broken else text

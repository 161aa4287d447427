"""QK-Clip (Kimi K2, arXiv 2507.20534, section 2.1): keep every head's attention logits below a threshold.

After the optimizer step, a head whose largest logit S of the step exceeded tau has its query and key rows scaled so
that its logits shrink by gamma = tau / S exactly; the other heads do not change by a bit.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from triscale.config import ClipRows, TriScaleError

from .grouping import ClipTarget, declared_roles

RowScales = list[tuple[int, int, float]]  # (first row, row after the last, factor)
RULES = ("per_query_head", "grouped")


@dataclass(frozen=True)
class ClipReport:
    """What one step saw: per module, the largest logit of each head (-inf = never seen) and its gamma (1 = kept)."""

    max_logits: dict[str, list[float]]
    gamma: dict[str, list[float]]

    @property
    def clipped(self) -> int:
        return sum(g < 1 for gammas in self.gamma.values() for g in gammas)


def gamma_of(maximum: float, threshold: float) -> float:
    """tau / S where S is finite and above tau, else 1: non-positive, NaN, infinite and unseen maxima clip nothing."""
    return threshold / maximum if math.isfinite(maximum) and maximum > threshold > 0 else 1.0


def collect(modules: Iterable[nn.Module], process_group: dist.ProcessGroup | None = None) -> list[list[float]]:
    """Per module, the maxima of its heads over this step's micro-batches and all ranks; resets them to -inf.

    One packed MAX reduction serves all modules. NaN is turned into +inf first, which no reduction can lose.
    """
    buffers: list[Tensor] = [module.max_logits for module in modules]  # type: ignore[misc]
    if not buffers:
        return []
    flat = torch.cat([b.detach().flatten().float() for b in buffers])
    flat = torch.where(flat.isnan(), torch.inf, flat)
    if dist.is_available() and dist.is_initialized():
        dist.all_reduce(flat, dist.ReduceOp.MAX, group=process_group)
    for buffer in buffers:
        buffer.fill_(-torch.inf)
    values = flat.tolist()  # the step's only wait for the device
    result, start = [], 0
    for buffer in buffers:
        result.append(values[start : start + buffer.numel()])
        start += buffer.numel()
    return result


def row_scales(clip: Sequence[ClipRows], gamma: Sequence[float], rule: str, name: str) -> RowScales:
    """(start, stop, factor) of the rows to multiply; rows of heads that stay are left out."""
    scales: RowScales = []
    for rows in clip:
        if rows.rule not in ("", rule):
            continue
        heads = (rows.head,) if isinstance(rows.head, int) else rows.head
        if max(heads) >= len(gamma):
            raise TriScaleError(
                f"{name}: QK-Clip rows name head {max(heads)}, but only {len(gamma)} heads are measured"
            )
        smallest = min(gamma[head] for head in heads)
        if smallest < 1:
            scales.append((rows.start, rows.stop, smallest**rows.power))
    return scales


@torch.no_grad()
def scale_rows(weight: Tensor, scales: RowScales) -> None:
    """Multiply rows of a (possibly row-sharded) weight in place."""
    rows, offset = _local_rows(weight)
    for start, stop, factor in scales:
        first, last = max(start - offset, 0), min(stop - offset, rows.shape[_row_dimension(rows)])
        if first < last:
            rows.narrow(_row_dimension(rows), first, last - first).mul_(factor)


def _local_rows(weight: Tensor) -> tuple[Tensor, int]:
    """This rank's rows and the number of rows before them."""
    if not isinstance(weight, DTensor):
        return weight, 0
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    _, offset = compute_local_shape_and_global_offset(weight.shape, weight.device_mesh, weight.placements)
    return weight._local_tensor, offset[_row_dimension(weight)]


def _row_dimension(weight: Tensor) -> int:
    """Rows of a weight, or the entries of a bias, which belong to the rows of its weight."""
    return max(weight.ndim - 2, 0)


class QKClip:
    """Clips the softmax-attention modules of one model after each optimizer step."""

    def __init__(
        self,
        targets: Sequence[ClipTarget],
        threshold: float,
        rule: str = "per_query_head",
        process_group: dist.ProcessGroup | None = None,
    ):
        if not threshold > 0:
            raise ValueError(f"qk_clip_threshold: {threshold} must be positive, or None to switch clipping off")
        if rule not in RULES:
            raise ValueError(f"qk_clip_rule: {rule!r} must be one of {RULES}")
        self.targets, self.threshold, self.rule, self.group = list(targets), threshold, rule, process_group
        for target in self.targets:
            target.module.record_max_logits = True  # type: ignore[assignment]

    @torch.no_grad()
    def apply(self, scale: Callable[[Tensor, RowScales], None]) -> ClipReport:
        """Clip once; ``scale(parameter, scales)`` multiplies the rows in every copy of a parameter."""
        maxima = collect([target.module for target in self.targets], self.group)
        report = ClipReport({}, {})
        for target, heads in zip(self.targets, maxima, strict=True):
            gamma = [gamma_of(value, self.threshold) for value in heads]
            report.max_logits[target.name], report.gamma[target.name] = heads, gamma
            if min(gamma) == 1:
                continue
            roles = declared_roles(target.module)
            for name in target.parameters:
                parameter = target.module.get_parameter(name)
                scales = row_scales(roles[id(parameter)].clip, gamma, self.rule, f"{target.name}.{name}")
                if scales:
                    scale(parameter, scales)
        return report

"""MuonClip: Muon for matrices, AdamW for the rest, QK-Clip after the step.

Sources: Muon with decay and matched update size, arXiv 2502.16982, section 2 (Moonlight); QK-Clip, arXiv 2507.20534,
section 2.1 (Kimi K2); per-head orthogonalisation, arXiv 2607.24653, section 2.5 (Kimi K3).

For a matrix W [m, n] with gradient G:

    M <- momentum * M + (1 - momentum) * G
    N  = (1 - momentum) * G + momentum * M                     (Nesterov; without it N = M)
    O  = orthogonalize(N)
    W <- W - lr * (weight_decay * W + 0.2 * sqrt(max(m, n)) * O)

M is the exponential average; the papers write the plain sum M' = momentum * M' + G. The two differ by the constant
factor 1 - momentum, which orthogonalisation removes, so the updates agree up to the epsilon in its normalisation.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn

from triscale.config import TriScaleError
from triscale.ops.newton_schulz import METHODS, orthogonalize, product_flops

from .adamw import check_rates
from .base import RuleOptimizer, local
from .distributed import active_anywhere, exchange, is_row_sharded, local_blocks, row_range, shard_group
from .grouping import clip_targets
from .qk_clip import ClipReport, QKClip, RowScales, scale_rows

Scale = Literal["match_rms", "spectral", "none"]
RMS = 0.2
WORKSPACE = 1 << 20  # elements orthogonalised in one batch: more would leave the processor's cache


def update_scale(rows: int, columns: int, scale: Scale) -> float:
    """The factor on an orthogonal update. "match_rms": 0.2 sqrt(max(m, n)), RMS 0.2 like AdamW's (Moonlight).

    "spectral": sqrt(max(1, m / n)), Jordan's convention, which wants a learning rate of its own. "none": 1.
    """
    if scale == "match_rms":
        return RMS * math.sqrt(max(rows, columns))
    return math.sqrt(max(1.0, rows / columns)) if scale == "spectral" else 1.0


class MuonClip(RuleOptimizer):
    """A torch optimizer for any module: Muon, AdamW and QK-Clip with one learning rate and one weight decay.

    params: a module (roles decide; needed for QK-Clip), named parameters (names decide), or groups that say
    ``"algorithm": "muon" | "adamw"``. orthogonalizer: a key of ``triscale.ops.newton_schulz.METHODS``; ns_steps
    overrides its number of steps. ns_dtype: arithmetic of the orthogonaliser, "bfloat16", "float32" or "float16".
    per_head: orthogonalise every head's block of the q, k and v projections apart. qk_clip_threshold: None switches
    QK-Clip off. qk_clip_rule: for keys shared by several query heads, "per_query_head" leaves them alone, "grouped"
    scales the whole group. update_scale: see :func:`update_scale`.

    After each step ``clip_report`` holds the step's largest logits and what was clipped.
    """

    @dataclass(frozen=True, kw_only=True)
    class Config:
        lr: float = 1e-3
        weight_decay: float = 0.1
        momentum: float = 0.95
        nesterov: bool = True
        orthogonalizer: str = "jordan5"
        ns_steps: int | None = None
        ns_dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
        update_scale: Scale = "match_rms"
        per_head: bool = False
        qk_clip_threshold: float | None = 100.0  # 0 = off (TOML has no null)
        qk_clip_rule: Literal["per_query_head", "grouped"] = "per_query_head"
        beta1: float = 0.9
        beta2: float = 0.95
        eps: float = 1e-8

        def __post_init__(self) -> None:
            check_rates(self.lr, self.weight_decay, self.momentum, self.beta1, self.beta2)
            if self.orthogonalizer not in METHODS:
                raise ValueError(f"orthogonalizer: {self.orthogonalizer!r} is unknown; known: {', '.join(METHODS)}")
            if self.qk_clip_threshold is not None and self.qk_clip_threshold < 0:
                raise ValueError(f"qk_clip_threshold: {self.qk_clip_threshold} must be positive, or 0 to switch it off")

        def build(self, model: nn.Module) -> MuonClip:
            return MuonClip(
                model,
                self.lr,
                self.weight_decay,
                self.momentum,
                self.nesterov,
                self.orthogonalizer,
                self.per_head,
                self.qk_clip_threshold or None,
                (self.beta1, self.beta2),
                adamw_eps=self.eps,
                ns_steps=self.ns_steps,
                ns_dtype=self.ns_dtype,
                update_scale=self.update_scale,
                qk_clip_rule=self.qk_clip_rule,
            )

    def __init__(
        self,
        params: Any,
        lr: float = 1e-3,
        weight_decay: float = 0.1,
        momentum: float = 0.95,
        nesterov: bool = True,
        orthogonalizer: str = "jordan5",
        per_head: bool = False,
        qk_clip_threshold: float | None = 100.0,
        adamw_betas: tuple[float, float] = (0.9, 0.95),
        *,
        adamw_eps: float = 1e-8,
        ns_steps: int | None = None,
        ns_dtype: str = "bfloat16",
        update_scale: Scale = "match_rms",
        qk_clip_rule: str = "per_query_head",
        process_group: dist.ProcessGroup | None = None,
    ):
        check_rates(lr, weight_decay, momentum, *adamw_betas)
        if orthogonalizer not in METHODS:
            raise ValueError(f"orthogonalizer: {orthogonalizer!r} is unknown; known: {', '.join(METHODS)}")
        defaults = {
            "lr": lr, "weight_decay": weight_decay, "momentum": momentum, "nesterov": nesterov,
            "orthogonalizer": orthogonalizer, "ns_steps": ns_steps, "ns_dtype": ns_dtype, "update_scale": update_scale,
            "betas": tuple(adamw_betas), "eps": adamw_eps,
        }  # fmt: skip
        model = params if isinstance(params, nn.Module) else None
        super().__init__(params, defaults, per_head=per_head)
        self.clip_report: ClipReport | None = None
        self.skipped_mixers: list[str] = []
        self.qk_clip = self._make_clip(model, qk_clip_threshold, qk_clip_rule, process_group)

    @classmethod
    def for_model(cls, model: nn.Module, **settings: Any) -> MuonClip:
        """MuonClip for a model of ours, or a Hugging Face Llama-, Qwen- or DeepSeek-V3-style model.

        The latter's attention modules are taught their roles and the logit probe first
        (:func:`triscale.optim.foreign.adapt`).
        """
        if not any(hasattr(module, "parameter_roles") for module in model.modules()):
            from .foreign import adapt

            adapt(model)
        return cls(model, **settings)

    def describe(self) -> str:
        """The table of rules, followed by what QK-Clip covers and what it skips."""
        lines = [super().describe()]
        if self.qk_clip is None:
            lines.append("QK-Clip: off")
        else:
            names = ", ".join(t.name for t in self.qk_clip.targets) or "none"
            lines.append(f"QK-Clip: threshold {self.qk_clip.threshold:g}, rule {self.qk_clip.rule}, layers: {names}")
        if self.skipped_mixers:
            lines.append(f"QK-Clip skips (no softmax, or QK-norm): {', '.join(self.skipped_mixers)}")
        return "\n".join(lines)

    @property
    def flops_per_step(self) -> int:
        """FLOPs of the orthogonalisation in one step, every matrix product counted in full."""
        total = 0
        for group in self.param_groups:
            for parameter in group["params"] if group["algorithm"] == "muon" else ():
                for count, rows, columns in self.rules[id(parameter)].shapes(parameter.shape):
                    total += count * product_flops(rows, columns, group["orthogonalizer"], group["ns_steps"])
        return total

    def update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        if group["algorithm"] == "muon":
            self._muon_update(group, parameters)
        else:
            self.adamw_update(group, parameters)

    def after_update(self) -> None:
        if self.qk_clip is not None:
            self.clip_report = self.qk_clip.apply(self._scale)

    def _scale(self, parameter: Tensor, scales: RowScales) -> None:
        """Scale rows of the fp32 master if there is one and round it again: the two copies cannot drift apart."""
        scale_rows(self.state.get(parameter, {}).get("master", parameter), scales)
        self.round_masters([parameter])

    def _make_clip(
        self, model: nn.Module | None, threshold: float | None, rule: str, process_group: dist.ProcessGroup | None
    ) -> QKClip | None:
        if model is not None:
            targets, self.skipped_mixers = clip_targets(model)
        if threshold is None:
            return None
        if model is None:
            raise TriScaleError("QK-Clip needs to know the attention modules. Pass the model, not its parameters, "
                                "or set qk_clip_threshold=None")  # fmt: skip
        if (
            not targets
            and not self.skipped_mixers
            and any(r.source == "default" and r.algorithm == "muon" for r in self.rules.values())
        ):
            raise TriScaleError("QK-Clip found no attention it knows in this model. Use MuonClip.for_model(model), "
                                "declare parameter_roles() with clip rows, or set qk_clip_threshold=None")  # fmt: skip
        return QKClip(targets, threshold, rule, process_group)

    # -- Muon ------------------------------------------------------------------------------------------------------

    def _muon_update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        lr, momentum = float(group["lr"]), group["momentum"]
        members = group["params"]
        sharded = [p for p in members if is_row_sharded(p, self.rules[id(p)].name)]
        if sharded:
            rows_group = shard_group(sharded[0])
            needed = active_anywhere(sharded, rows_group)
            sharded = [p for p, active in zip(sharded, needed, strict=True) if active]
        cut = {id(p) for p in sharded}
        whole = [p for p in parameters if id(p) not in cut and not is_row_sharded(p)]
        everything = [*whole, *sharded]
        if not everything:
            return
        buffers = [local(self.fp32_state(p, "momentum")["momentum"]) for p in everything]
        grads = [
            torch.zeros_like(b) if p.grad is None else local(p.grad).to(b.dtype)
            for p, b in zip(everything, buffers, strict=True)
        ]
        torch._foreach_lerp_(buffers, grads, 1 - momentum)
        targets = [self.target(p) for p in everything]
        if group["weight_decay"]:
            torch._foreach_mul_(targets, 1 - lr * group["weight_decay"])
        count = len(whole)
        for batch in self._batches(group, whole, grads[:count], buffers[:count], targets[:count]):
            _orthogonal_step(group, lr, batch)
        if sharded:
            self._sharded_step(group, sharded, rows_group, grads[count:], buffers[count:], targets[count:])

    def _sharded_step(
        self,
        group: dict[str, Any],
        parameters: list[Tensor],
        rows_group: dist.ProcessGroup,
        grads: list[Tensor],
        buffers: list[Tensor],
        targets: list[Tensor],
    ) -> None:
        dtype = torch.float64 if buffers[0].dtype == torch.float64 else getattr(torch, group["ns_dtype"])
        mix = torch._foreach_lerp(grads, buffers, group["momentum"]) if group["nesterov"] else buffers
        shapes = [(p.shape[0], p.shape[1]) for p in parameters]
        blocks = [self.rules[id(p)].blocks or (p.shape[0],) for p in parameters]

        def orthogonalize_all(matrices: dict[int, Tensor]) -> dict[int, Tensor]:
            return _orthogonalize_blocks(group, matrices, blocks)

        steps = exchange([m.to(dtype) for m in mix], shapes, rows_group, orthogonalize_all)
        ranks, rank = dist.get_world_size(rows_group), dist.get_rank(rows_group)
        for target, step, (rows, columns), sizes in zip(targets, steps, shapes, blocks, strict=True):
            scales = [update_scale(size, columns, group["update_scale"]) for size in sizes]
            for first, last, scale in local_blocks(row_range(rows, ranks, rank), sizes, scales):
                target[first:last].add_(step[first:last], alpha=-float(group["lr"]) * scale)

    def _batches(
        self, group: dict[str, Any], parameters: list[Tensor], *tensors: Sequence[Tensor]
    ) -> Iterator[list[Piece]]:
        """All logical matrices of the group, those of one shape batched."""
        shapes: dict[tuple[int, int], list[Piece]] = {}
        for parameter, *views in zip(parameters, *tensors, strict=True):
            start, columns = 0, parameter.shape[-1]
            for rows in self.rules[id(parameter)].blocks or (parameter.shape[-2],):
                grad, momentum, target = (_stack(t.narrow(-2, start, rows)) for t in views)
                piece = Piece(grad, momentum, target, update_scale(rows, columns, group["update_scale"]))
                shapes.setdefault((rows, columns), []).append(piece)
                start += rows
        for (rows, columns), pieces in shapes.items():
            yield from _chunks(pieces, max(1, WORKSPACE // (rows * columns)))


class Piece(NamedTuple):
    """Matrices [count, m, n] of one parameter: views of its gradient, momentum, and of the tensor to be moved."""

    grad: Tensor
    momentum: Tensor
    target: Tensor
    scale: float

    def part(self, start: int, stop: int) -> Piece:
        return Piece(self.grad[start:stop], self.momentum[start:stop], self.target[start:stop], self.scale)


def _stack(tensor: Tensor) -> Tensor:
    """View [..., m, n] as [count, m, n]."""
    flat = tensor.unsqueeze(0) if tensor.ndim == 2 else tensor.flatten(0, -3)
    assert flat.numel() == 0 or flat.data_ptr() == tensor.data_ptr(), "a copy would lose the update"
    return flat


def _chunks(pieces: list[Piece], limit: int) -> Iterator[list[Piece]]:
    """Batches of at most ``limit`` matrices; large stacks are cut."""
    batch: list[Piece] = []
    room = limit
    for piece in pieces:
        start, count = 0, piece.grad.shape[0]
        while start < count:
            taken = min(room, count - start)
            batch.append(piece.part(start, start + taken))
            start, room = start + taken, room - taken
            if room == 0:
                yield batch
                batch, room = [], limit
    if batch:
        yield batch


def _orthogonal_step(group: dict[str, Any], lr: float, pieces: list[Piece]) -> None:
    """Move the targets of one batch by their orthogonalised (Nesterov) momentum, gathered in a workspace."""
    counts = [p.grad.shape[0] for p in pieces]
    work = torch.empty(sum(counts), *pieces[0].grad.shape[1:], dtype=pieces[0].grad.dtype, device=pieces[0].grad.device)
    for piece, slot in zip(pieces, work.split(counts), strict=True):
        if group["nesterov"]:
            torch.lerp(piece.grad, piece.momentum, group["momentum"], out=slot)
        else:
            slot.copy_(piece.momentum)
    dtype = torch.float64 if work.dtype == torch.float64 else getattr(torch, group["ns_dtype"])
    result = orthogonalize(work, group["orthogonalizer"], group["ns_steps"], dtype=dtype)
    for piece, step in zip(pieces, result.split(counts), strict=True):
        piece.target.add_(step, alpha=-lr * piece.scale)


def _orthogonalize_blocks(
    group: dict[str, Any], matrices: dict[int, Tensor], blocks: Sequence[tuple[int, ...]]
) -> dict[int, Tensor]:
    """Orthogonalise the blocks of whole matrices in place, equal shapes in one batch."""
    shapes: dict[torch.Size, list[Tensor]] = {}
    for index, matrix in matrices.items():
        for block in matrix.split(list(blocks[index])):
            shapes.setdefault(block.shape, []).append(block)
    for (rows, columns), members in shapes.items():
        limit = max(1, WORKSPACE // (rows * columns))
        for start in range(0, len(members), limit):
            batch = members[start : start + limit]
            result = orthogonalize(torch.stack(batch), group["orthogonalizer"], group["ns_steps"])
            for block, step in zip(batch, result, strict=True):
                block.copy_(step)
    return matrices

"""Which rule every parameter follows: read from the roles that modules declare, never from ``ndim`` alone.

A module with ``parameter_roles()`` speaks for its own parameters. Anything left over (a foreign model) gets a default
from its name, the kind of module that holds it and its shape, marked as such in :func:`describe`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from triscale.config import ClipRows, ConfigError, Role

Algorithm = Literal["muon", "adamw"]


@dataclass(frozen=True)
class Rule:
    """How one parameter is updated.

    blocks: row counts along dim -2 of the matrices that are orthogonalised apart; () = one matrix (per leading index).
    source: "role" if a module declared it, "default" if it was guessed, "group" if the caller's group says so.
    """

    name: str
    algorithm: Algorithm
    kind: str
    blocks: tuple[int, ...] = ()
    decay: bool = True
    source: str = "role"
    clip: tuple[ClipRows, ...] = ()

    def shapes(self, shape: torch.Size) -> list[tuple[int, int, int]]:
        """The matrices orthogonalised: (how many, rows, columns)."""
        if self.algorithm != "muon":
            return []
        count = math.prod(shape[:-2])
        return [(count, rows, shape[-1]) for rows in self.blocks or (shape[-2],)]


@dataclass(frozen=True)
class ClipTarget:
    """One softmax-attention module: where its maxima are and which of its parameters hold clip rows."""

    name: str
    module: nn.Module
    parameters: tuple[str, ...]


def rule_for(name: str, parameter: Tensor, role: Role, per_head: bool, source: str = "role") -> Rule:
    """The rule of a parameter with ``role``; raises :class:`ConfigError` if the declared blocks do not fit it."""
    if role.is_matrix and parameter.ndim < 2:
        raise ConfigError(name, f"is declared a {role.kind} but has shape {list(parameter.shape)}",
                          "Declare it as 'vector', 'gate', 'bias' or 'norm'")  # fmt: skip
    blocks = (role.head_blocks or role.blocks) if per_head else role.blocks
    if blocks and sum(blocks) != parameter.shape[-2]:
        raise ConfigError(name, f"its blocks sum to {sum(blocks)} rows but it has {parameter.shape[-2]}",
                          "Correct blocks / head_blocks in the module's parameter_roles()")  # fmt: skip
    muon = role.is_matrix and min(parameter.shape[-2:]) > 1  # a [1, d] "matrix" is a vector
    return Rule(name, "muon" if muon else "adamw", role.kind, blocks if muon else (), role.decay, source, role.clip)


def rules_for_module(model: nn.Module, per_head: bool) -> dict[str, Rule]:
    """The rule of every trainable parameter of ``model`` by full name, in ``named_parameters`` order."""
    roles = declared_roles(model)
    owners = {id(p): module for module in model.modules() for p in module.parameters(recurse=False)}
    rules = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        role = roles.get(id(parameter))
        source = "role" if role else "default"
        role = role or default_role(name, parameter, owners.get(id(parameter)))
        rules[name] = rule_for(name, parameter, role, per_head, source)
    return rules


def declared_roles(model: nn.Module) -> dict[int, Role]:
    """id(parameter) -> role, from every module that declares ``parameter_roles``.

    A parameter that two modules share (a tied head) keeps the first declaration.
    """
    roles: dict[int, Role] = {}
    for path, module in model.named_modules():
        declare = getattr(module, "parameter_roles", None)
        if declare is None:
            continue
        for relative, role in declare().items():
            try:
                parameter = module.get_parameter(relative)
            except AttributeError as error:
                raise ConfigError(f"{path or type(module).__name__}.{relative}",
                                  "is declared by parameter_roles() but is no parameter") from error  # fmt: skip
            roles.setdefault(id(parameter), role)
    return roles


def clip_targets(model: nn.Module) -> tuple[list[ClipTarget], list[str]]:
    """The softmax-attention modules that can be clipped, and the mixers (no softmax, or QK-norm) that are skipped."""
    targets, skipped = [], []
    for path, module in model.named_modules():
        declare = getattr(module, "parameter_roles", None)
        if declare is None:
            continue
        clipped = tuple(name for name, role in declare().items() if role.clip)
        if clipped and getattr(module, "max_logits", None) is None:
            raise ConfigError(path, "declares rows for QK-Clip but keeps no max_logits",
                              "Register an fp32 buffer max_logits [heads] and call observe()")  # fmt: skip
        if clipped:
            targets.append(ClipTarget(path, module, clipped))
        elif hasattr(module, "cache_spec") or hasattr(module, "qk_clip_skip"):  # every mixer of ours has a cache
            skipped.append(path)
    return targets, skipped


_EMBEDDING = re.compile(r"(^|[._])(embed|embeddings?|wte|wpe|tok_embeddings|embed_tokens|position)([._]|$)|embedding")
_HEAD = re.compile(r"(^|\.)(lm_head|head|output|score|classifier|unembed)(\.|$)")
_NORM = re.compile(r"(^|[._])(layer_?norm|rms_?norm|norm\d*|ln_?\w*|\w+norm)\.|norm\.weight$")
_GATE = re.compile(r"(^|\.)(A_log|dt_bias)$")
_CONVOLUTION = re.compile(r"conv")


def default_role(name: str, parameter: Tensor, owner: nn.Module | None = None) -> Role:
    """A guess for a parameter that nobody declared, from its module's class, its name and its shape."""
    if _GATE.search(name):
        return Role(kind="gate", decay=False)
    if isinstance(owner, nn.Embedding) or _EMBEDDING.search(name):
        return Role(kind="embedding")
    if name.endswith("bias"):
        return Role(kind="bias")
    if (owner is not None and "Conv" in type(owner).__name__) or _CONVOLUTION.search(name):
        return Role(kind="convolution")
    if _NORM.search(name) or (owner is not None and "Norm" in type(owner).__name__):
        return Role(kind="norm")
    if parameter.ndim < 2 or min(parameter.shape[-2:]) == 1:
        return Role(kind="vector")
    return Role(kind="head") if _HEAD.search(name) else Role(kind="matrix")


def describe(rules: Iterable[Rule], shapes: dict[str, torch.Size]) -> str:
    """A table with every parameter exactly once: its shape, rule, matrices, decay and where the rule comes from."""
    rows = [("parameter", "shape", "rule", "matrices", "decay", "because")]
    for rule in rules:
        shape = shapes[rule.name]
        matrices = " + ".join(f"{n}x[{r}, {c}]" for n, r, c in _merge(rule.shapes(shape))) or "-"
        because = rule.kind if rule.source == "role" else f"{rule.kind} ({rule.source})"
        rows.append((rule.name, "x".join(map(str, shape)) or "scalar", rule.algorithm, matrices,
                     "yes" if rule.decay else "no", because))  # fmt: skip
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    )


def _merge(shapes: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    merged: dict[tuple[int, int], int] = {}
    for count, rows, columns in shapes:
        merged[rows, columns] = merged.get((rows, columns), 0) + count
    return [(count, rows, columns) for (rows, columns), count in merged.items()]

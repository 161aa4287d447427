"""What MuonClip and AdamW share: groups by rule, fp32 state, fp32 masters, exact state dicts, the AdamW update.

Sharded parameters (DTensor) keep sharded state; everything elementwise runs on the local shard.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from triscale.config import TriScaleError

from .grouping import Rule, default_role, describe, rule_for, rules_for_module

LOW_PRECISION = (torch.bfloat16, torch.float16)


def local(tensor: Tensor) -> Tensor:
    """This rank's piece of a sharded tensor, or the tensor itself; shares memory with it."""
    return tensor._local_tensor if isinstance(tensor, DTensor) else tensor


def gradient(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


class RuleOptimizer(torch.optim.Optimizer):
    """Base class: one :class:`Rule` a parameter, one group per (algorithm, decay).

    State is fp32 whatever the parameter's dtype. Parameters in half precision get an fp32 master in the state, to
    which updates are applied before it is rounded into the parameter.
    """

    def __init__(self, params: Any, defaults: dict[str, Any], *, per_head: bool = False, muon: bool = True):
        groups, rules = _as_groups(params, per_head, muon, defaults["weight_decay"])
        self.rules: dict[int, Rule] = {id(p): rule for p, rule in rules}
        super().__init__(groups, {"algorithm": "adamw", **defaults})

    # -- state -----------------------------------------------------------------------------------------------------

    def fp32_state(self, parameter: Tensor, *names: str) -> dict[str, Any]:
        """The parameter's state with zero-initialised fp32 buffers ``names``, and its master if it needs one."""
        state = self.state[parameter]
        for name in names:
            if name not in state:
                state[name] = torch.zeros_like(parameter, dtype=_state_dtype(parameter),
                                               memory_format=torch.preserve_format)  # fmt: skip
        if parameter.dtype in LOW_PRECISION and "master" not in state:
            state["master"] = parameter.detach().to(torch.float32, copy=True)
        return state

    def target(self, parameter: Tensor) -> Tensor:
        """The local tensor that updates are applied to: the fp32 master if there is one."""
        return local(self.state[parameter].get("master", parameter))

    def round_masters(self, parameters: Iterable[Tensor]) -> None:
        """Round the fp32 masters into their half-precision parameters."""
        for parameter in parameters:
            master = self.state.get(parameter, {}).get("master")
            if master is not None:
                local(parameter).copy_(local(master))

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore exactly: state keeps its own dtype (torch would round it to the parameter's).

        Raises :class:`TriScaleError` if the saved parameters have other names.
        """
        saved = [name for group in state_dict["param_groups"] for name in group.get("param_names", ())]
        ours = [name for group in self.param_groups for name in group.get("param_names", ())]
        if saved and ours and saved != ours:
            odd = sorted(set(saved) ^ set(ours))[:5]
            raise TriScaleError(f"the optimizer state belongs to other parameters: {odd or 'same names, other order'}")
        super().load_state_dict(state_dict)
        ids = [index for group in state_dict["param_groups"] for index in group["params"]]
        parameters = [p for group in self.param_groups for p in group["params"]]
        for index, parameter in zip(ids, parameters, strict=True):
            for name, value in state_dict["state"].get(index, {}).items():
                if isinstance(value, Tensor):
                    self.state[parameter][name] = value.detach().to(parameter.device, copy=True)

    def describe(self) -> str:
        """A table with every parameter exactly once: shape, rule, the matrices it is cut into, decay, and why."""
        parameters = [p for group in self.param_groups for p in group["params"]]
        rules = [self.rules[id(p)] for p in parameters]
        order = sorted(range(len(rules)), key=lambda i: (rules[i].algorithm != "muon", i))
        return describe([rules[i] for i in order], {self.rules[id(p)].name: p.shape for p in parameters})

    # -- steps -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def step(self, closure=None):
        """One update; ``closure`` re-evaluates the model and returns the loss, as with any torch optimizer."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        for group in self.param_groups:
            active = [p for p in group["params"] if p.grad is not None]
            self.update_group(group, active)
            self.round_masters(group["params"])
        self.after_update()
        return loss

    def update_group(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        self.adamw_update(group, parameters)

    def after_update(self) -> None:
        """Hook for what follows all groups."""

    def adamw_update(self, group: dict[str, Any], parameters: list[Tensor]) -> None:
        """AdamW (Loshchilov and Hutter 2019) with decoupled decay by the group's lr."""
        if not parameters:
            return
        (beta1, beta2), lr, rms = group["betas"], float(group["lr"]), group.get("update_rms")
        states = [self.fp32_state(p, "exp_avg", "exp_avg_sq") for p in parameters]
        for state in states:
            state["step"] = state.get("step", 0) + 1
        targets = [self.target(p) for p in parameters]
        means = [local(s["exp_avg"]) for s in states]
        squares = [local(s["exp_avg_sq"]) for s in states]
        grads = [local(gradient(p)).to(m.dtype) for p, m in zip(parameters, means, strict=True)]
        torch._foreach_lerp_(means, grads, 1 - beta1)
        torch._foreach_mul_(squares, beta2)
        torch._foreach_addcmul_(squares, grads, grads, 1 - beta2)
        updates = torch._foreach_sqrt(squares)
        torch._foreach_div_(updates, [(1 - beta2 ** s["step"]) ** 0.5 for s in states])
        torch._foreach_add_(updates, group["eps"])
        updates = torch._foreach_div(means, updates)
        torch._foreach_div_(updates, [1 - beta1 ** s["step"] for s in states])
        if rms is not None:
            self._fix_rms(parameters, updates, rms)
        if group["weight_decay"]:
            torch._foreach_mul_(targets, 1 - lr * group["weight_decay"])
        torch._foreach_add_(targets, updates, alpha=-lr)

    def _fix_rms(self, parameters: list[Tensor], updates: Sequence[Tensor], rms: float) -> None:
        for parameter, update in zip(parameters, updates, strict=True):
            if self.rules[id(parameter)].kind not in ("matrix", "router"):
                continue
            if isinstance(parameter, DTensor):
                raise TriScaleError("update_rms needs whole matrices; leave it unset for sharded parameters")
            size = update.square().mean(dim=(-2, -1), keepdim=True).sqrt()
            update.mul_(rms / size.clamp(min=1e-12))


def _state_dtype(parameter: Tensor) -> torch.dtype:
    return torch.float64 if parameter.dtype == torch.float64 else torch.float32


def _as_groups(
    params: Any, per_head: bool, muon: bool, weight_decay: float
) -> tuple[list[dict[str, Any]], list[tuple[Tensor, Rule]]]:
    """Torch parameter groups with names, and the rule of every parameter."""
    if isinstance(params, nn.Module):
        rules = rules_for_module(params, per_head)
        named: list[tuple[str, Tensor]] = [(name, p) for name, p in params.named_parameters() if name in rules]
        return _split(named, rules, muon, weight_decay)
    items = list(params)  # a generator would be consumed by the first look at it
    if not items:
        raise ValueError("no parameters to optimize")
    if isinstance(items[0], dict):
        groups, rules_of = [], []
        for number, group in enumerate(items):
            built, found = _caller_group(group, number, per_head, muon, weight_decay)
            groups += built
            rules_of += found
        return groups, rules_of
    if not isinstance(items[0], tuple):
        raise TriScaleError("bare tensors say nothing about their role. Pass the module, its named_parameters(), "
                            'or groups {"params": [...], "algorithm": "muon" or "adamw"}')  # fmt: skip
    rules = {name: rule_for(name, p, default_role(name, p), per_head, "default") for name, p in items}
    return _split(items, rules, muon, weight_decay)


def _caller_group(
    group: dict[str, Any], number: int, per_head: bool, muon: bool, weight_decay: float
) -> tuple[list[dict[str, Any]], list[tuple[Tensor, Rule]]]:
    """A group as the caller wrote it. With "algorithm" it is taken at its word; without, names decide."""
    given = group["params"]
    members = [given] if isinstance(given, Tensor) else list(given)
    named = [m if isinstance(m, tuple) else (f"group{number}.{i}", m) for i, m in enumerate(members)]
    algorithm = group.get("algorithm")
    if algorithm is None:
        if not all(isinstance(m, tuple) for m in members):
            raise TriScaleError(f'group {number}: without names, say "algorithm": "muon" or "adamw"')
        rules = {name: rule_for(name, p, default_role(name, p), per_head, "default") for name, p in named}
        groups, found = _split(named, rules, muon, group.get("weight_decay", weight_decay))
        extra = {k: v for k, v in group.items() if k not in ("params", "weight_decay")}
        return [{**g, **extra} for g in groups], found
    if algorithm not in ("muon", "adamw"):
        raise TriScaleError(f'group {number}: algorithm {algorithm!r} is not "muon" or "adamw"')
    for name, parameter in named:
        if algorithm == "muon" and parameter.ndim < 2:
            raise TriScaleError(f"{name}: Muon needs matrices, this has shape {list(parameter.shape)}")
    found = [
        (p, Rule(name, algorithm, "matrix" if algorithm == "muon" else "vector", source="group")) for name, p in named
    ]
    return [{**group, "params": named}], found


def _split(
    named: list[tuple[str, Tensor]], rules: dict[str, Rule], muon: bool, weight_decay: float
) -> tuple[list[dict[str, Any]], list[tuple[Tensor, Rule]]]:
    buckets: dict[tuple[str, bool], list[tuple[str, Tensor]]] = {}
    found = []
    for name, parameter in named:
        rule = rules[name]
        algorithm = rule.algorithm if muon else "adamw"
        if algorithm != rule.algorithm:
            rule = Rule(name, "adamw", rule.kind, (), rule.decay, rule.source, rule.clip)
        found.append((parameter, rule))
        buckets.setdefault((algorithm, rule.decay), []).append((name, parameter))
    groups = [
        {"params": members, "algorithm": algorithm, "weight_decay": weight_decay if decay else 0.0}
        for (algorithm, decay), members in buckets.items()
    ]
    return groups, found

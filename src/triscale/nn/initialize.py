"""Initial values: every parameter has its own generator, seeded by (seed, name).

So two models agree on every parameter whose name and shape they share, whatever else differs: arms of a ladder, ranks
of a job and meta-device builds start from the same weights.
"""

from __future__ import annotations

import hashlib

import torch
from torch import nn

from triscale.config import Role


def collect_roles(model: nn.Module) -> dict[str, Role]:
    """``{full parameter name: role}`` for the whole model.

    Raises ``ValueError`` if a parameter is declared by nobody or by two modules: grouping must be complete.
    """
    roles: dict[str, Role] = {}
    for prefix, module in model.named_modules():
        declare = getattr(module, "parameter_roles", None)
        if declare is None:
            continue
        for name, role in declare().items():
            full = f"{prefix}.{name}" if prefix else name
            if full in roles:
                raise ValueError(f"parameter {full} is given a role twice")
            roles[full] = role
    names = {name for name, _ in model.named_parameters()}
    missing, unknown = sorted(names - roles.keys()), sorted(roles.keys() - names)
    shared = {name for name, _ in model.named_parameters(remove_duplicate=False)} - names
    unknown = [name for name in unknown if name not in shared]
    if missing:
        raise ValueError(f"parameters without a role: {', '.join(missing)}; declare them in parameter_roles()")
    if unknown:
        raise ValueError(f"roles for parameters that do not exist: {', '.join(unknown)}")
    return {name: roles[name] for name, _ in model.named_parameters()}


def parameter_seed(seed: int, name: str) -> int:
    digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
    return int.from_bytes(digest[:8], "little") >> 1


@torch.no_grad()
def initialize(model: nn.Module, seed: int = 0) -> nn.Module:
    """Draw every parameter of ``model`` in place, following the roles its modules declare."""
    owners = dict(model.named_modules())
    parameters = dict(model.named_parameters())
    for name, role in collect_roles(model).items():
        parameter = parameters[name]
        generator = torch.Generator().manual_seed(parameter_seed(seed, name))
        shape = tuple(parameter.shape)
        if role.initial == "normal":
            value = torch.empty(shape, dtype=torch.float32).normal_(0.0, role.std, generator=generator)
        elif role.initial == "custom":
            value = _owner_value(owners, name, shape, generator)
        else:
            value = torch.full(shape, 1.0 if role.initial == "ones" else 0.0)
        parameter.copy_(value)
    return model


def _owner_value(owners: dict, name: str, shape: tuple[int, ...], generator: torch.Generator) -> torch.Tensor:
    """Ask the nearest module above the parameter that defines ``initial_value``."""
    pieces = name.split(".")
    for cut in range(len(pieces) - 1, -1, -1):
        owner = owners.get(".".join(pieces[:cut]))
        if owner is not None and hasattr(owner, "initial_value"):
            return owner.initial_value(".".join(pieces[cut:]), shape, generator)
    raise ValueError(f"{name}: its role says initial='custom', but no module above it defines initial_value()")

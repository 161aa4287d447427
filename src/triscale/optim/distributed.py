"""Muon for row-sharded parameters: each matrix is orthogonalised once, whole, on the rank that owns it.

ZeRO-1 style (arXiv 2502.16982, Algorithm 1): momentum and weights stay sharded; the momentum-updated gradient of a
matrix travels to its owner and the owner returns each rank its rows of the result. Owners are balanced by the cost of
the iteration. Every rank takes part in every exchange, so a rank without rows (a small matrix, many ranks) never
leaves the others waiting.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard

from triscale.config import TriScaleError

ROUND = 1 << 26  # elements exchanged at once


def is_row_sharded(parameter: Tensor, name: str = "parameter") -> bool:
    """Whether matrices of ``parameter`` are cut across ranks.

    Stacks sharded over their leading dimension hold whole matrices, and so do replicas: both need no exchange. Raises
    :class:`TriScaleError` for other layouts.
    """
    if not isinstance(parameter, DTensor):
        return False
    shards = [p for p in parameter.placements if not p.is_replicate()]
    if not shards or all(isinstance(p, Shard) and p.dim < parameter.ndim - 2 for p in shards):
        return False
    if len(shards) == 1 and isinstance(shards[0], Shard) and shards[0].dim == parameter.ndim - 2 == 0:
        return True
    raise TriScaleError(f"{name}: Muon cannot gather the layout {parameter.placements}; shard dimension 0 only "
                        "(fully_shard does)")  # fmt: skip


def shard_group(parameter: DTensor) -> dist.ProcessGroup:
    """The ranks among which the rows of ``parameter`` are divided."""
    dimension = next(i for i, p in enumerate(parameter.placements) if isinstance(p, Shard))
    return parameter.device_mesh.get_group(dimension)


def row_range(rows: int, ranks: int, rank: int) -> tuple[int, int]:
    """The rows rank ``rank`` holds: equal pieces, the last ones short or empty (as ``torch.chunk`` cuts)."""
    piece = -(-rows // ranks)
    return min(rank * piece, rows), min((rank + 1) * piece, rows)


def assign_owners(shapes: Sequence[tuple[int, int]], ranks: int) -> list[int]:
    """A rank for each matrix: the costliest first, each to the rank with the least work so far."""
    cost = lambda shape: 2 * min(shape) ** 2 * max(shape) + min(shape) ** 3
    work, owners = [0] * ranks, [0] * len(shapes)
    for index in sorted(range(len(shapes)), key=lambda i: (-cost(shapes[i]), i)):
        owners[index] = min(range(ranks), key=lambda r: (work[r], r))
        work[owners[index]] += cost(shapes[index])
    return owners


def active_anywhere(parameters: Sequence[Tensor], group: dist.ProcessGroup) -> list[bool]:
    """Which parameters have a gradient on any rank: all ranks must agree on what is exchanged."""
    mask = torch.tensor([p.grad is not None for p in parameters], dtype=torch.int32, device=parameters[0].device)
    dist.all_reduce(mask, dist.ReduceOp.MAX, group=group)
    return [bool(value) for value in mask.tolist()]


def exchange(
    updates: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    group: dist.ProcessGroup,
    orthogonalize_all: Callable[[dict[int, Tensor]], dict[int, Tensor]],
) -> list[Tensor]:
    """Orthogonalised local rows for local ``updates`` [rows of this rank, columns], one per matrix of ``shapes``.

    orthogonalize_all: maps {matrix index: whole matrix} to results of the same shapes and dtype.
    """
    results: list[Tensor] = []
    for first, last in _rounds(shapes):
        results += _exchange_round(updates[first:last], shapes[first:last], group, first, orthogonalize_all)
    return results


def _rounds(shapes: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    rounds, first, size = [], 0, 0
    for index, (rows, columns) in enumerate(shapes):
        if size and size + rows * columns > ROUND:
            rounds.append((first, index))
            first, size = index, 0
        size += rows * columns
    return [*rounds, (first, len(shapes))] if len(shapes) > first else rounds


def _exchange_round(
    updates: Sequence[Tensor],
    shapes: Sequence[tuple[int, int]],
    group: dist.ProcessGroup,
    offset: int,
    orthogonalize_all: Callable[[dict[int, Tensor]], dict[int, Tensor]],
) -> list[Tensor]:
    ranks, rank = dist.get_world_size(group), dist.get_rank(group)
    owners = assign_owners(shapes, ranks)
    mine = [i for i, owner in enumerate(owners) if owner == rank]
    theirs = [[i for i, owner in enumerate(owners) if owner == r] for r in range(ranks)]
    rows_of = lambda i, r: row_range(shapes[i][0], ranks, r)
    size_of = lambda i, r: (rows_of(i, r)[1] - rows_of(i, r)[0]) * shapes[i][1]

    outgoing = [sum(size_of(i, rank) for i in theirs[r]) for r in range(ranks)]
    incoming = [sum(size_of(i, r) for i in mine) for r in range(ranks)]
    order = [i for r in range(ranks) for i in theirs[r]]
    gathered = _all_to_all([updates[i] for i in order], outgoing, incoming, group, updates[0])

    pieces: dict[int, list[Tensor]] = {i: [] for i in mine}
    for r, received in enumerate(gathered.split(incoming)):
        for i, piece in zip(mine, received.split([size_of(i, r) for i in mine]), strict=True):
            pieces[i].append(piece.view(-1, shapes[i][1]))
    whole = orthogonalize_all({offset + i: torch.cat(pieces[i]) for i in mine})

    parts = [whole[offset + i][slice(*rows_of(i, r))] for r in range(ranks) for i in mine]
    returned = _all_to_all(parts, incoming, outgoing, group, updates[0])
    results: list[Tensor] = list(updates)
    for i, piece in zip(order, returned.split([size_of(i, rank) for i in order]), strict=True):
        results[i] = piece.view(-1, shapes[i][1])
    return results


def _all_to_all(
    tensors: Sequence[Tensor], send: list[int], receive: list[int], group: dist.ProcessGroup, like: Tensor
) -> Tensor:
    """Send ``tensors`` end to end, ``send[r]`` elements to rank r; bytes, because gloo knows no bfloat16 here."""
    flat = torch.cat([t.reshape(-1) for t in tensors]) if tensors else like.new_empty(0)
    output = like.new_empty(sum(receive))
    width = like.element_size()
    dist.all_to_all_single(
        output.view(torch.uint8), flat.view(torch.uint8), [n * width for n in receive], [n * width for n in send],
        group=group,
    )  # fmt: skip
    return output


def local_blocks(rows: tuple[int, int], blocks: Sequence[int], values: Sequence[Any]) -> list[tuple[int, int, Any]]:
    """(first, last, value) within a rank's rows of each block they touch, so that a block's factor reaches its rows."""
    found, start = [], 0
    for size, value in zip(blocks, values, strict=True):
        first, last = max(start, rows[0]), min(start + size, rows[1])
        if first < last:
            found.append((first - rows[0], last - rows[0], value))
        start += size
    return found

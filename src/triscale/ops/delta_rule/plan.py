"""How tokens are laid out in chunks: rows of a batch, packed documents sharing chunks, or aligned documents.

- **rows**: [B, T] split into chunks of C tokens; the tail is padded with tokens that change nothing (k = v = 0, g = 0,
  beta = 0). Packed documents of one length are rows too.
- **shared**: packed documents of any length without states in or out. Chunks ignore the boundaries; masks cut every
  interaction across one. No padding whatever the lengths.
- **aligned**: packed documents with an initial or a final state. Each document starts a chunk of its own.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import lru_cache
from itertools import pairwise

import torch
from torch import Tensor

PADDING_ALLOWED = 1.15  # equal documents become rows while padding them costs at most this factor


@dataclass(frozen=True)
class Plan:
    chunk: int  # C, tokens per chunk
    chunks: int  # chunks along the scan
    rows: int  # the batch the tensors are viewed as: [rows, tokens / rows, ...]
    starts: dict[int, int] = field(default_factory=dict)  # chunk -> state slot read before it
    ends: dict[int, int] = field(default_factory=dict)  # chunk -> state slot written after it
    slots: int = 1
    empty: tuple[int, ...] = ()  # slots of documents without tokens: their final state is their initial one
    gather: Tensor | None = None  # aligned: token of each chunk position [chunks * C]
    valid: Tensor | None = None  # aligned: which of them are tokens, not padding
    document: Tensor | None = None  # shared: document of each chunk position [chunks, C]
    cut: tuple[bool, ...] = ()  # shared: whether any boundary lies in or before chunk i


def chunk_for(longest: int, chunk: int) -> int:
    """The chunk actually used: a short sequence does not pay for a long chunk."""
    size = 16
    while size < min(longest, chunk):
        size *= 2
    return size


def plan_rows(batch: int, tokens: int, chunk: int) -> Plan:
    size = chunk_for(tokens, chunk)
    chunks = -(-tokens // size)
    return Plan(size, chunks, batch, {0: 0}, {chunks - 1: 0})


@lru_cache(maxsize=32)
def plan_packed(offsets: tuple[int, ...], chunk: int, states: bool, device: torch.device) -> Plan:
    """The cheapest layout for documents with cumulative lengths ``offsets``."""
    lengths = [b - a for a, b in pairwise(offsets)]
    longest = max(lengths, default=0)
    if longest and min(lengths) == longest:
        size = chunk_for(longest, chunk)
        padded = -(-longest // size) * size
        if states or padded <= PADDING_ALLOWED * longest or len(lengths) == 1:
            return plan_rows(len(lengths), longest, chunk)
    return _aligned(lengths, chunk, device) if states else _shared(lengths, chunk, device)


def _aligned(lengths: list[int], chunk: int, device: torch.device) -> Plan:
    size = chunk_for(max(lengths, default=0), chunk)
    starts, ends, empty = {}, {}, []
    pieces, valid, chunks, token = [], [], 0, 0
    for slot, length in enumerate(lengths):
        if not length:
            empty.append(slot)
            continue
        count = -(-length // size)
        starts[chunks], ends[chunks + count - 1] = slot, slot
        positions = torch.arange(count * size)
        pieces.append((positions + token).clamp(max=token + length - 1))
        valid.append(positions < length)
        chunks, token = chunks + count, token + length
    gather = torch.cat(pieces) if pieces else torch.zeros(0, dtype=torch.long)
    mask = torch.cat(valid) if valid else torch.zeros(0, dtype=torch.bool)
    return Plan(size, chunks, 1, starts, ends, len(lengths), tuple(empty), gather.to(device), mask.to(device))


def _shared(lengths: list[int], chunk: int, device: torch.device) -> Plan:
    tokens = sum(lengths)
    size = chunk_for(tokens, chunk)
    chunks = -(-tokens // size)
    ids = torch.repeat_interleave(torch.arange(len(lengths)), torch.tensor(lengths, dtype=torch.long))
    if tokens:
        ids = torch.cat([ids, ids[-1:].expand(chunks * size - tokens)])
    document = ids.view(chunks, size)
    last = document[:, -1]
    before = torch.cat([torch.full((1,), -1), last[:-1]])  # the document whose state enters the chunk
    cut = tuple((last != before).tolist())
    return Plan(size, chunks, 1, document=document.to(device), cut=cut)

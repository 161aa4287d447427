"""Segments of a sequence compose exactly, in one process and over ranks."""

import os
import socket
from itertools import pairwise

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.config import TriScaleError
from triscale.ops import (
    causal_short_convolution,
    context_parallel_gated_delta_rule,
    gated_delta_rule,
    gated_delta_rule_by_segments,
    segment_map,
)
from triscale.ops.delta_rule.context_parallel import exchange_halo, share_of

HEADS, KEYS, VALUES = 2, 6, 5


def make(tokens, strength=1.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=generator, dtype=torch.float64)
    q, k = (F.normalize(draw(1, tokens, HEADS, KEYS), dim=-1) for _ in range(2))
    g = -strength * torch.rand(1, tokens, HEADS, KEYS, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, tokens, HEADS, generator=generator, dtype=torch.float64)
    return [x.requires_grad_() for x in (q, k, draw(1, tokens, HEADS, VALUES), g, beta)]


@settings(max_examples=15, deadline=None)
@given(cuts=st.lists(st.integers(0, 150), max_size=3), strength=st.sampled_from([0.1, 1.0, 20.0]))
def test_maps_compose_to_the_serial_state(cuts, strength):
    _, k, v, g, beta = make(150, strength)
    start = torch.randn(1, HEADS, KEYS, VALUES, dtype=torch.float64)
    bounds = sorted({0, 150, *cuts})
    maps = [segment_map(*(x[:, a:b] for x in (k, v, g, beta))) for a, b in pairwise(bounds)]
    composed = maps[0]
    for later in maps[1:]:
        composed = composed.then(later)
    _, serial = gated_delta_rule(k, k, v, g, beta, initial_state=start, output_final_state=True)
    assert torch.allclose(composed.apply(start), serial, atol=1e-12)


@pytest.mark.parametrize("segments", [1, 3, 5])
def test_segments_side_by_side_equal_one_pass(segments):
    leaves = make(150)
    start = torch.randn(1, HEADS, KEYS, VALUES, dtype=torch.float64, requires_grad=True)
    found = gated_delta_rule_by_segments(*leaves, segments, initial_state=start, output_final_state=True)
    expected = gated_delta_rule(*leaves, initial_state=start, output_final_state=True)
    gradients = [torch.autograd.grad(o.sin().sum() + s.cos().sum(), [*leaves, start]) for o, s in (found, expected)]
    for a, b in zip((*found, *gradients[0]), (*expected, *gradients[1]), strict=True):
        assert torch.allclose(a, b, atol=1e-11)
    with pytest.raises(TriScaleError, match="multiple of segments"):
        gated_delta_rule_by_segments(*leaves, 7)


def test_share_of_a_rank():
    offsets = (0, 4, 4, 10, 20)
    assert share_of(offsets, 0, 4) == ((0, 4), 0, False)
    assert share_of(offsets, 2, 7) == ((0, 2, 5), 2, True)
    assert share_of(offsets, 4, 12) == ((0, 6, 8), 0, True)
    assert share_of(offsets, 12, 20) == ((0, 8), 2, False)


# splits of 90 tokens over two ranks, and the documents of the row (None = one document over both)
CASES = [((45, 45), None), ((1, 89), None), ((64, 26), [0, 90]), ((45, 45), [0, 45, 90]), ((50, 40), [0, 7, 7, 48, 90]),
         ((20, 70), [0, 19, 21, 22, 90])]  # fmt: skip


def _rank(rank, world, port, splits_of_cases):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port), OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=world)
    for counts, documents in splits_of_cases:
        _check_rank(rank, counts, documents)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown and abort the process after a passed test


def _check_rank(rank, counts, documents):
    total, start = sum(counts), sum(counts[:rank])
    here = slice(start, start + counts[rank])
    leaves = make(total)
    whole, _ = gated_delta_rule(*leaves, cu_seqlens=documents)
    expected = torch.autograd.grad(whole.sin().sum(), leaves)
    parts = [x.detach()[:, here].requires_grad_() for x in leaves]
    out = context_parallel_gated_delta_rule(*parts, cu_seqlens=documents)
    found = torch.autograd.grad(out.sin().sum(), parts)
    assert torch.allclose(out, whole[:, here], atol=1e-12), ("output", counts, documents)
    for name, a, b in zip(["q", "k", "v", "g", "beta"], found, expected, strict=True):
        assert torch.allclose(a, b[:, here], atol=1e-11), (name, counts, documents)
    if min(counts) >= 3:
        _check_halo(here, total, documents)


def _check_halo(here, total, documents):
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(1, total, 3, generator=generator, dtype=torch.float64).requires_grad_()
    weight = torch.randn(3, 4, generator=generator, dtype=torch.float64)
    whole, _ = causal_short_convolution(x, weight, cu_seqlens=documents)
    (expected,) = torch.autograd.grad(whole.sin().sum(), x)
    part = x.detach()[:, here].requires_grad_()
    state, share = exchange_halo(part, 3, cu_seqlens=documents)
    y, _ = causal_short_convolution(part, weight, initial_state=state, cu_seqlens=share.offsets)
    (found,) = torch.autograd.grad(y.sin().sum(), part)
    assert torch.allclose(y, whole[:, here], atol=1e-12)
    assert torch.allclose(found, expected[:, here], atol=1e-12)


def _free_port():
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return s.getsockname()[1]


def test_two_ranks_equal_one():
    mp.spawn(_rank, args=(2, _free_port(), CASES), nprocs=2)


@pytest.mark.slow
def test_a_document_crosses_three_ranks():
    mp.spawn(_rank, args=(3, _free_port(), [((30, 5, 55), None), ((30, 20, 40), [0, 10, 75, 90])]), nprocs=3)

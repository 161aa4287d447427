"""Sharded Muon: N ranks equal one rank, owners are balanced, empty shards do not hang, checkpoints reshard."""

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from triscale.config import ClipRows, Role, TriScaleError
from triscale.optim import MuonClip
from triscale.optim.distributed import assign_owners, is_row_sharded, local_blocks, row_range

STEPS, ROWS = 20, 8


@given(rows=st.integers(0, 50), ranks=st.integers(1, 9))
def test_row_ranges_cut_like_chunk(rows, ranks):
    pieces = [p.tolist() for p in torch.arange(rows).chunk(ranks)] if rows else []
    ours = [list(range(*row_range(rows, ranks, r))) for r in range(ranks)]
    assert [p for p in ours if p] == pieces and [row for p in ours for row in p] == list(range(rows))


def test_owners_are_balanced_by_cost():
    shapes = [(64, 64)] * 7 + [(256, 64)] * 3 + [(300, 300)]
    owners = assign_owners(shapes, 3)
    cost = lambda s: 2 * min(s) ** 2 * max(s) + min(s) ** 3
    loads = [sum(cost(s) for s, o in zip(shapes, owners, strict=True) if o == r) for r in range(3)]
    assert max(loads) == cost((300, 300)) and owners.count(owners[-1]) == 1
    assert set(owners) == {0, 1, 2}


@given(blocks=st.lists(st.integers(1, 9), min_size=1, max_size=6), ranks=st.integers(1, 5))
def test_every_row_gets_its_blocks_value(blocks, ranks):
    expected = [i for i, size in enumerate(blocks) for _ in range(size)]
    got = []
    for rank in range(ranks):
        first, last = row_range(len(expected), ranks, rank)
        rows = [None] * (last - first)
        for start, stop, value in local_blocks((first, last), blocks, range(len(blocks))):
            rows[start:stop] = [value] * (stop - start)
        got += rows
    assert got == expected


class Attention(nn.Module):
    """Softmax attention of two heads with fused projections, uneven shapes, a stack of experts, a one-row matrix."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(12, 30, bias=False)
        self.out = nn.Linear(10, 12, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 7, 12) * 0.3)
        self.narrow = nn.Linear(12, 2, bias=False)
        self.norm = nn.Parameter(torch.ones(12))
        self.record_max_logits = False
        self.register_buffer("max_logits", torch.full((2,), -torch.inf), persistent=False)

    def forward(self, x):
        q, k, v = self.qkv(x * self.norm).chunk(3, -1)
        q, k, v = (t.unflatten(-1, (2, 5)).transpose(1, 2) for t in (q, k, v))
        logits = q @ k.mT / 5**0.5
        if self.record_max_logits:
            self.max_logits.copy_(torch.maximum(self.max_logits, logits.detach().amax((0, 2, 3))))
        h = self.out((logits.softmax(-1) @ v).transpose(1, 2).flatten(-2))
        inner = torch.einsum("btd,efd->btef", h, self.experts).relu()
        return self.narrow(h + torch.einsum("btef,efd->btd", inner, self.experts))

    def parameter_roles(self):
        clip = lambda base: tuple(ClipRows(h, base + 5 * h, base + 5 * h + 5, 0.5) for h in range(2))
        return {
            "qkv.weight": Role(kind="matrix", blocks=(10, 10, 10), head_blocks=(5,) * 6, clip=clip(0) + clip(10)),
            "out.weight": Role(kind="matrix"),
            "experts": Role(kind="matrix"),
            "narrow.weight": Role(kind="matrix"),
            "norm": Role(kind="norm"),
        }


def build(seed=0):
    torch.manual_seed(seed)
    model = nn.Sequential(Attention(), nn.Linear(2, 12, bias=False), Attention())
    with torch.no_grad():
        model[0].qkv.weight.mul_(4)
    return model


def data(step):
    generator = torch.Generator().manual_seed(1000 + step)
    return torch.randn(ROWS, 6, 12, generator=generator), torch.randn(ROWS, 6, 2, generator=generator)


def train(model, optimizer, first, last, rank=0, ranks=1):
    """Mean squared error over the global batch; every rank sees its rows. Returns global losses and clip counts."""
    losses, clips = [], []
    for step in range(first, last):
        x, y = (t.chunk(ranks)[rank] for t in data(step))
        optimizer.zero_grad()
        loss = (model(x) - y).square().sum() / (ROWS * 6 * 2)
        (loss * ranks).backward()  # fully_shard averages gradients over ranks
        optimizer.step()
        total = loss.detach().clone()
        if ranks > 1:
            dist.all_reduce(total)
        losses.append(total.item())
        clips.append(optimizer.clip_report.clipped)
    return losses, clips


def make(model, **settings):
    return MuonClip(model, lr=0.02, ns_dtype="float32", qk_clip_threshold=2.0, **settings)


def state_of(model, optimizer):
    """Model and optimizer state by name, whole."""
    from torch.distributed.checkpoint.state_dict import get_state_dict

    return get_state_dict(model, optimizer)


def worker(rank, ranks, folder, job):
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT="0", OMP_NUM_THREADS="1")
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo", init_method=f"file://{folder}/rendezvous_{job}_{ranks}", rank=rank, world_size=ranks
    )
    JOBS[job](rank, ranks, Path(folder))
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown and abort the process after a passed test


def sharded(ranks, **settings):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    model = build()
    mesh = init_device_mesh("cpu", (ranks,))
    for layer in model:
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
    return model, make(model, **settings)


def straight(rank, ranks, folder):
    for per_head in (False, True):
        model, optimizer = sharded(ranks, per_head=per_head)
        losses, clips = train(model, optimizer, 0, STEPS, rank, ranks)
        weights = {name: p.full_tensor().detach() for name, p in model.named_parameters()}
        if rank == 0:
            torch.save(
                {"losses": losses, "clips": clips, "weights": weights}, folder / f"straight_{ranks}_{per_head}.pt"
            )


def save_half(rank, ranks, folder):
    import torch.distributed.checkpoint as dcp

    model, optimizer = sharded(ranks)
    train(model, optimizer, 0, STEPS // 2, rank, ranks)
    weights, state = state_of(model, optimizer)
    dcp.save({"model": weights, "optimizer": state}, checkpoint_id=str(folder / "half"))


def resume_half(rank, ranks, folder):
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    model, optimizer = sharded(ranks)
    weights, state = state_of(model, optimizer)
    dcp.load({"model": weights, "optimizer": state}, checkpoint_id=str(folder / "half"))
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    losses, clips = train(model, optimizer, STEPS // 2, STEPS, rank, ranks)
    if rank == 0:
        torch.save({"losses": losses, "clips": clips}, folder / f"resumed_{ranks}.pt")


JOBS = {"straight": straight, "save": save_half, "resume": resume_half}


def launch(job, ranks, folder):
    mp.spawn(worker, args=(ranks, str(folder), job), nprocs=ranks)


@pytest.fixture(scope="module")
def single():
    result = {}
    for per_head in (False, True):
        model = build()
        losses, clips = train(model, make(model, per_head=per_head), 0, STEPS)
        result[per_head] = {"losses": losses, "clips": clips, "weights": dict(model.named_parameters())}
    assert sum(result[False]["clips"]) > 0, "the comparison must cover clipping"
    return result


def same(ours, reference, start=0):
    assert ours["clips"] == reference["clips"][start:]
    assert ours["losses"] == pytest.approx(reference["losses"][start:], abs=1e-5, rel=1e-5)


def test_two_ranks_equal_one(single, tmp_path):
    launch("straight", 2, tmp_path)
    for per_head in (False, True):
        result = torch.load(tmp_path / f"straight_2_{per_head}.pt")
        same(result, single[per_head])
        for name, weight in result["weights"].items():
            assert torch.allclose(weight, single[per_head]["weights"][name], rtol=0, atol=1e-5), name


@pytest.mark.slow
def test_checkpoint_of_two_ranks_resumes_on_one_and_four(single, tmp_path):
    """Four ranks leave some without rows of the narrow matrices: no hang, same numbers."""
    launch("save", 2, tmp_path)
    for ranks in (1, 4):
        launch("resume", ranks, tmp_path)
        same(torch.load(tmp_path / f"resumed_{ranks}.pt"), single[False], STEPS // 2)


def test_unknown_layouts_are_refused():
    assert not is_row_sharded(torch.zeros(3, 3))
    from torch.distributed.tensor import DTensor, Shard, init_device_mesh

    store = dist.HashStore()
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    try:
        mesh = init_device_mesh("cpu", (1,))
        with pytest.raises(TriScaleError, match="layout"):
            is_row_sharded(DTensor.from_local(torch.zeros(3, 3), mesh, [Shard(1)]), "w")
        assert is_row_sharded(DTensor.from_local(torch.zeros(3, 3), mesh, [Shard(0)]))
        assert not is_row_sharded(DTensor.from_local(torch.zeros(2, 3, 3), mesh, [Shard(0)]))
    finally:
        dist.destroy_process_group()

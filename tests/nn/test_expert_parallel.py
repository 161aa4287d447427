"""Expert parallelism over two processes computes what one process computes on the joined batch."""

import os
import tempfile

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from triscale.nn.balancing import QuantileBalance, SignBalance
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.expert_parallel import shard_experts
from triscale.nn.initialize import initialize
from triscale.nn.mixture_of_experts import MixtureOfExperts

WIDTH, RANKS = 12, 2
CASES = [
    {"balance": QuantileBalance.Config()},
    {"balance": QuantileBalance.Config(estimator="exact"), "latent": 8, "shared": 2},
    {"balance": SignBalance.Config(rate=0.01), "activation": "situ_glu", "shared": 0},
]
SPLITS = [[10, 17], [0, 9], [1, 1]]  # tokens per rank; a rank may have none


def build(options):
    config = MixtureOfExperts.Config(experts=6, top_k=2, hidden=5, **options)
    module = initialize(config.build(BuildContext(width=WIDTH, dtype=torch.float64)))
    with torch.no_grad():
        module.gate.weight.mul_(40)
    return module


def inputs(split):
    x = torch.randn(1, sum(split), WIDTH, generator=torch.Generator().manual_seed(sum(split)), dtype=torch.float64)
    return x, torch.linspace(-1, 1, x.numel(), dtype=torch.float64).view_as(x)


def step(module, x, upstream):
    """Output, input gradient, and gradients and bias after one step; two micro-batches of the same tokens."""
    x = x.clone().requires_grad_()
    batch = TokenBatch.from_lengths(torch.zeros(x.shape[1], dtype=torch.int64), [x.shape[1]])
    for _ in range(2):
        out = module(x, batch)
        out.backward(upstream)
    module.gate.after_optimizer_step()
    return out.detach(), x.grad


def whole(tensor):
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def rank_main(rank, init_file):
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{init_file}", rank=rank, world_size=RANKS)
    mesh = init_device_mesh("cpu", (RANKS,))
    with pytest.raises(ValueError, match="5 cannot be split over 2 ranks"):
        shard_experts(MixtureOfExperts.Config(experts=5).build(BuildContext(width=8)), mesh)
    for options in CASES:
        for split in SPLITS:
            x, upstream = inputs(split)
            start, stop = sum(split[:rank]), sum(split[: rank + 1])
            module = build(options)
            assert len(shard_experts(module, mesh)) == 2
            assert module.experts.gate_up_proj.to_local().shape[0] == 6 // RANKS
            out, x_grad = step(module, x[:, start:stop], upstream[:, start:stop])
            single = build(options)
            single.gate.after_optimizer_step = lambda: None
            expected, expected_grad = step(single, x, upstream)
            torch.testing.assert_close(out, expected[:, start:stop])
            torch.testing.assert_close(x_grad, expected_grad[:, start:stop])
            for (name, p), q in zip(module.named_parameters(), single.parameters(), strict=True):
                got = p.grad if p.grad is not None else torch.zeros_like(p)
                if isinstance(got, DTensor):
                    got = got.full_tensor()  # complete already: tokens came to the expert
                else:
                    dist.all_reduce(got)
                torch.testing.assert_close(got, q.grad, msg=lambda m, n=name: f"{n}: {m}")
            gate = single.gate
            bias = gate.balance.next_bias(gate.e_score_correction_bias, gate.load)
            torch.testing.assert_close(module.gate.e_score_correction_bias, bias.float())
            assert torch.equal(module.gate.last_load, gate.load)
            state = {k: whole(v) for k, v in module.state_dict().items()}
            assert all(torch.equal(state[k], v) for k, v in single.state_dict().items() if "bias" not in k)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown and abort the process after a passed test


def test_two_ranks_equal_one():
    with tempfile.TemporaryDirectory() as folder:
        mp.spawn(rank_main, args=(f"{folder}/init",), nprocs=RANKS, join=True)

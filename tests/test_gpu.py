"""Device checks for whoever has a GPU (`make test-gpu`): the same code gives the same numbers there."""

from __future__ import annotations

import pytest
import torch

from triscale.config import from_dict
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.ops import gated_delta_rule, orthogonalize
from triscale.optim import MuonClip

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device on this machine"),
]


def kimi_model() -> Decoder:
    tree = {
        "width": 64, "depth": 4, "vocabulary": 128, "residual": {"kind": "block_attention", "block": 4},
        "mixer": {"kind": "hybrid", "pattern": "3:1", "linear": {"kind": "delta_attention", "heads": 2},
                  "full": {"kind": "latent_attention", "heads": 2}},
    }  # fmt: skip
    return from_dict(Decoder.Config, tree).build(seed=0).train()


def batch(device: str) -> TokenBatch:
    tokens = torch.randint(0, 128, (2, 96), generator=torch.Generator().manual_seed(0))
    made = TokenBatch.from_rows(tokens, [[0, 40], [0]], tokens.roll(-1, 1), torch.ones(2, 96))
    return made.to(device)


def test_training_step_agrees_with_the_cpu():
    results = {}
    for device in ("cpu", "cuda"):
        model = kimi_model().to(device)
        optimizer = MuonClip(model, lr=1e-2, ns_dtype="float32")
        loss = model(batch(device)) / 192
        loss.backward()
        optimizer.step()
        results[device] = float(loss.detach()), {n: p.detach().cpu() for n, p in model.named_parameters()}
    assert results["cuda"][0] == pytest.approx(results["cpu"][0], rel=1e-4)
    for name, value in results["cpu"][1].items():
        torch.testing.assert_close(results["cuda"][1][name], value, rtol=1e-2, atol=1e-3, msg=name)


@pytest.mark.parametrize("strength", [0.05, 1.0, 20.0])
def test_delta_rule_agrees_with_the_cpu(strength):
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(1, 300, 2, 32, generator=generator) for _ in range(3))
    g, beta = -strength * torch.rand(1, 300, 2, 32, generator=generator), torch.rand(1, 300, 2, generator=generator)
    inputs = [q, torch.nn.functional.normalize(k, dim=-1), v, g, beta]
    here, _ = gated_delta_rule(*inputs)
    there, _ = gated_delta_rule(*[x.cuda() for x in inputs])
    torch.testing.assert_close(there.cpu(), here, rtol=1e-3, atol=1e-3)


def test_orthogonalize_agrees_with_the_cpu():
    matrix = torch.randn(3, 48, 80, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(orthogonalize(matrix.cuda()).cpu(), orthogonalize(matrix), rtol=1e-2, atol=1e-2)


def test_experts_and_depth_attention_agree_with_the_cpu():
    tree = {
        "width": 64, "depth": 2, "vocabulary": 128, "residual": {"kind": "attention"}, "first_dense": 1,
        "mixer": {"kind": "latent_attention", "heads": 2, "rope_theta": 10000.0, "output_gate": True},
        "feed_forward": {"kind": "mixture_of_experts", "experts": 8, "hidden": 32, "latent": 32, "activation": "situ_glu"},
    }  # fmt: skip
    results = {}
    for device in ("cpu", "cuda"):
        model = from_dict(Decoder.Config, tree).build(seed=0).to(device).train()
        model(batch(device)).backward()
        gate = model.layers[1].feed_forward.gate
        gate.after_optimizer_step()
        results[device] = {n: p.grad.cpu() for n, p in model.named_parameters() if p.grad is not None}
        results[device]["bias"] = gate.e_score_correction_bias.cpu()
    for name, value in results["cpu"].items():
        torch.testing.assert_close(results["cuda"][name], value, rtol=1e-2, atol=1e-3, msg=name)
    model = model.bfloat16().eval()  # torch's grouped product is taken here
    with torch.inference_mode():
        low = model(TokenBatch.from_rows(torch.arange(24, device="cuda").view(2, 12)), output="logits")
    assert low.isfinite().all()

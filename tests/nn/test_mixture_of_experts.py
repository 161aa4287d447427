"""Mixture of experts: definition, transformers as oracle, counting rules, precision of the bias."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from triscale.config import from_dict, to_dict
from triscale.nn.balancing import NoBalance, QuantileBalance, SignBalance
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.initialize import collect_roles, initialize
from triscale.nn.mixture_of_experts import MixtureOfExperts
from triscale.nn.situ import SituGLU

WIDTH = 16
BALANCES = [SignBalance.Config(rate=0.01), QuantileBalance.Config(), QuantileBalance.Config(estimator="exact")]


def build(dtype=torch.float32, seed=0, **options):
    config = MixtureOfExperts.Config(**{"experts": 6, "top_k": 2, "hidden": 8, **options})
    module = initialize(config.build(BuildContext(width=WIDTH, dtype=dtype)), seed)
    with torch.no_grad():
        module.gate.weight.mul_(30)
        module.gate.e_score_correction_bias.copy_(torch.linspace(-0.2, 0.2, config.experts))
    return module


def tokens(count, seed=0, dtype=torch.float32):
    return torch.randn(1, count, WIDTH, generator=torch.Generator().manual_seed(seed)).to(dtype)


def batch_of(*lengths):
    return TokenBatch.from_lengths(torch.zeros(sum(lengths), dtype=torch.int64), lengths)


def definition(m, x):
    """Token by token, expert by expert."""
    c, out = m.config, []
    scores = torch.sigmoid(x.to(m.gate.weight.dtype) @ m.gate.weight.T)
    for token, s in zip(x, scores, strict=True):
        chosen = (s + m.gate.e_score_correction_bias).topk(c.top_k).indices
        weights = s[chosen] / s[chosen].sum() * m.gate.scaling
        z = token if c.latent is None else m.routed_expert_down_proj(token)
        mixed = torch.zeros_like(z)
        for e, w in zip(chosen, weights, strict=True):
            gate, up = (m.experts.gate_up_proj[e] @ z).chunk(2)
            inner = F.silu(gate) * up
            if c.activation == "situ_glu":
                inner = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * 25 * torch.tanh(up / 25)
            mixed = mixed + w * (m.experts.down_proj[e] @ inner)
        if c.latent is not None:
            mixed = m.routed_expert_up_proj(m.routed_expert_norm(mixed) if c.latent_norm else mixed)
        out.append(mixed if m.shared_experts is None else mixed + m.shared_experts(token))
    return torch.stack(out)


@pytest.mark.parametrize(
    "options",
    [{}, {"shared": 2}, {"shared": 0, "routed_scaling": 2.5}, {"latent": 10}, {"latent": 10, "latent_norm": False},
     {"activation": "situ_glu", "latent": 10, "shared": 2}],
    ids=str,
)  # fmt: skip
def test_equals_definition_with_gradients(options):
    m, x = build(torch.float64, **options), tokens(13, dtype=torch.float64).requires_grad_()
    leaves = [x, *m.parameters()]
    got, wanted = m(x, batch_of(13)), definition(m, x[0])[None]
    torch.testing.assert_close(got, wanted)
    upstream = torch.randn_like(got)
    for a, b in zip(
        torch.autograd.grad(got, leaves, upstream), torch.autograd.grad(wanted, leaves, upstream), strict=True
    ):
        torch.testing.assert_close(a, b, rtol=1e-7, atol=1e-10)


@given(cut=st.integers(1, 19), seed=st.integers(0, 99))
@settings(max_examples=10, deadline=None)
def test_tokens_are_independent_of_their_batch(cut, seed):
    m, x = build(torch.float64), tokens(20, seed, torch.float64)
    parts = torch.cat([m(x[:, :cut], batch_of(cut)), m(x[:, cut:], batch_of(20 - cut))], dim=1)
    torch.testing.assert_close(m(x, batch_of(20)), parts)


def run_step(m, pieces, recompute=False):
    for piece in pieces:
        batch = batch_of(piece.shape[1])
        out = checkpoint(m, piece, batch, use_reentrant=False) if recompute else m(piece, batch)
        out.square().sum().backward()
    load = m.gate.load.clone()
    m.gate.after_optimizer_step()
    return load, m.gate.e_score_correction_bias.clone()


@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_counts_and_bias_are_the_same_with_recomputation_and_for_any_accumulation(balance):
    x, results = tokens(60).requires_grad_(), []
    for sizes, recompute in itertools.product(([60], [20, 40], [1] * 60), (False, True)):
        results.append(run_step(build(balance=balance), x.split(sizes, dim=1), recompute))
    for load, bias in results:
        assert torch.equal(load, results[0][0]) and load.sum() == 120
        torch.testing.assert_close(bias, results[0][1], rtol=0, atol=1e-7)


@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_evaluation_never_counts(balance):
    m, x = build(balance=balance), tokens(30)
    before = m.gate.e_score_correction_bias.clone()
    with torch.no_grad():
        m(x, batch_of(30))
    m.eval()
    m(x, batch_of(30))
    m.train()
    m.gate.after_optimizer_step()
    assert m.gate.load.sum() == 0 and torch.equal(m.gate.e_score_correction_bias, before)


@pytest.mark.parametrize("balance", BALANCES, ids=str)
def test_the_bias_moves_only_at_the_step(balance):
    m, x = build(balance=balance), tokens(40)
    before = m.gate.e_score_correction_bias.clone()
    m(x, batch_of(40))
    m(x, batch_of(40))
    assert torch.equal(m.gate.e_score_correction_bias, before)
    m.gate.after_optimizer_step()
    assert not torch.equal(m.gate.e_score_correction_bias, before)
    assert m.gate.statistics()["max_load"] >= 1


def test_no_balance_leaves_the_bias():
    _, bias = run_step(build(balance=NoBalance.Config()), [tokens(40)])
    assert torch.equal(bias, torch.linspace(-0.2, 0.2, 6))


def test_training_with_quantile_balancing_evens_the_load():
    m, x = build(balance=QuantileBalance.Config(estimator="exact")), tokens(600)
    loads = [run_step(m, [x])[0] for _ in range(5)]
    assert loads[0].max() > 1.3 * loads[0].double().mean() and loads[-1].max() < 1.1 * loads[-1].double().mean()


def test_bias_stays_fp32_and_exact_through_dtype_changes_and_checkpoints():
    m = build()
    exact = torch.linspace(-0.2, 0.2, 6) + 1e-5
    m.gate.e_score_correction_bias.copy_(exact)
    for moved in (m.to(torch.bfloat16), m.half(), m.to("cpu", torch.bfloat16), m.bfloat16()):
        assert moved.gate.e_score_correction_bias.dtype == torch.float32
        assert torch.equal(moved.gate.e_score_correction_bias, exact)
        assert torch.equal(m.state_dict()["gate.e_score_correction_bias"], exact)
    assert m.gate.weight.dtype == torch.bfloat16
    other = build().to(torch.bfloat16)
    other.load_state_dict(m.state_dict())
    assert torch.equal(other.gate.e_score_correction_bias, exact)


def test_scores_are_fp32_in_bf16_models_and_under_autocast():
    m, x = build(), tokens(200)
    with torch.autocast("cpu", torch.bfloat16):
        low = m.gate(x[0], batch_of(200))
    assert low.weights.dtype == torch.float32
    assert torch.equal(low.indices, m.gate(x[0], batch_of(200)).indices)
    with torch.autocast("cpu", torch.bfloat16):
        out = m(x, batch_of(200))
    torch.testing.assert_close(out, m(x, batch_of(200)), rtol=0.1, atol=0.05)


def test_experts_without_tokens_get_zero_gradients():
    m = build()
    m.gate.e_score_correction_bias.copy_(torch.tensor([9.0, 9.0, 0, 0, 0, 0]))
    m(tokens(10), batch_of(10)).sum().backward()
    assert (m.experts.down_proj.grad[2:] == 0).all() and m.experts.down_proj.grad[:2].abs().sum() > 0
    assert all(p.grad is not None for p in m.parameters())


def test_sequence_loss_joins_the_gradient_and_scales_with_the_step():
    x, grads = tokens(24), []
    for weight, pieces in ((0.0, [(24, 1.0)]), (0.1, [(24, 1.0)]), (0.1, [(24, 0.5)]), (0.1, [(10, 1.0), (14, 1.0)])):
        m, start = build(torch.float64, sequence_loss=weight, balance=NoBalance.Config()), 0
        for length, scale in pieces:
            batch = batch_of(length) if len(pieces) > 1 else batch_of(10, 14)
            batch.memo["loss_scale"] = scale
            out = m(x[:, start : start + length].double(), batch)
            (out.square().sum() * scale).backward()
            start += length
        grads.append(m.gate.weight.grad)
    assert not torch.allclose(grads[0], grads[1])
    torch.testing.assert_close(grads[2], grads[1] / 2)
    torch.testing.assert_close(grads[3], grads[1])
    m = build(torch.float64, sequence_loss=0.1).eval()
    m(x.double(), batch_of(24)).square().sum().backward()
    torch.testing.assert_close(m.gate.weight.grad, grads[0])


def test_agrees_with_transformers():
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=WIDTH, moe_intermediate_size=8, n_routed_experts=12, num_experts_per_tok=3, n_shared_experts=2,
        n_group=4, topk_group=2, norm_topk_prob=True, routed_scaling_factor=2.5,
    )  # fmt: skip
    config._experts_implementation = "eager"
    peer = DeepseekV3MoE(config)
    for p in peer.parameters():
        torch.nn.init.normal_(p, std=0.3, generator=torch.Generator().manual_seed(p.numel()))
    peer.gate.e_score_correction_bias.copy_(torch.linspace(-0.3, 0.3, 12))
    ours = build(experts=12, top_k=3, shared=2, groups=4, top_groups=2, routed_scaling=2.5)
    ours.load_state_dict(peer.state_dict())
    x = tokens(50).requires_grad_()
    expected, got = peer(x), ours(x, batch_of(50))
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
    upstream = torch.randn_like(got)
    wanted = torch.autograd.grad(expected, [x, *peer.parameters()], upstream)
    by_name = {name: g for (name, _), g in zip(peer.named_parameters(), wanted[1:], strict=True)}
    gradients = torch.autograd.grad(got, [x, *ours.parameters()], upstream)
    torch.testing.assert_close(gradients[0], wanted[0], rtol=1e-3, atol=1e-4)
    for (name, _), gradient in zip(ours.named_parameters(), gradients[1:], strict=True):
        torch.testing.assert_close(gradient, by_name[name], rtol=1e-3, atol=1e-4)


def test_published_parameter_counts_of_one_layer():
    """3 E h m + h E + 3 h s m (+ the latent projections and their norm), the router's bias being a buffer."""
    h, layer = 7168, {"device": "meta"}
    k2 = MixtureOfExperts.Config(experts=384, top_k=8, hidden=2048).build(BuildContext(width=h, **layer))
    assert sum(p.numel() for p in k2.parameters()) == 3 * 384 * h * 2048 + h * 384 + 3 * h * 2048
    assert k2.inactive_parameters() == 376 * 3 * h * 2048
    k3 = MixtureOfExperts.Config(experts=896, top_k=16, hidden=3072, shared=2, latent=3584, activation="situ_glu")
    moe = k3.build(BuildContext(width=h, **layer))
    expected = 3 * 896 * 3584 * 3072 + h * 896 + 2 * h * 3584 + 3584 + 3 * h * 2 * 3072
    assert sum(p.numel() for p in moe.parameters()) == expected
    assert k3.scaling() == 1.0 and MixtureOfExperts.Config(experts=64, top_k=6).scaling() == pytest.approx(
        2.446, abs=2e-3
    )


def test_roles_cover_everything():
    m = build(latent=10, shared=1)
    roles = collect_roles(m)
    assert roles["experts.gate_up_proj"].blocks == (8, 8) and roles["gate.weight"].kind == "router"
    assert "gate.e_score_correction_bias" not in roles


def test_config_round_trip_kinds_and_errors():
    values = {"experts": 4, "top_k": 1, "balance": {"kind": "sign", "rate": 0.01}}
    config = from_dict(MixtureOfExperts.Config, values)
    assert isinstance(config.balance, SignBalance.Config)
    assert from_dict(MixtureOfExperts.Config, to_dict(config)) == config
    for bad in ({"top_k": 9}, {"groups": 3}, {"groups": 2, "top_groups": 3}, {"shared": -1}, {"hidden": 0}):
        with pytest.raises(ValueError, match=next(iter(bad))):
            MixtureOfExperts.Config(**bad)
    with pytest.raises(ValueError, match="top_k"):
        MixtureOfExperts.Config(experts=2, top_k=2).build(BuildContext(width=8))


def test_situ_layer_follows_its_formula():
    layer = initialize(SituGLU.Config(hidden=12).build(BuildContext(width=WIDTH)))
    x = tokens(5) * 50
    gate, up = layer.gate_proj(x), layer.up_proj(x)
    inner = 4 * torch.tanh(gate / 4) * torch.sigmoid(gate) * (25 * torch.tanh(up / 25))
    torch.testing.assert_close(layer(x), layer.down_proj(inner))
    with pytest.raises(ValueError, match="beta"):
        SituGLU.Config(beta=0.0)

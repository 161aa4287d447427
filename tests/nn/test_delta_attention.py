"""Kimi Delta Attention and the LSTM arm: against the published equations, packed, cached, initialised as published."""

import math

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from triscale.config import ConfigError, from_dict
from triscale.models.cache import LayerCache
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.delta_attention import KimiDeltaAttention
from triscale.nn.initialize import collect_roles, initialize
from triscale.nn.lstm import LSTM
from triscale.nn.parts import MIXERS

WIDTH = 24
VARIANTS = {
    "kimi linear": {},
    "k3": {"gate": "bounded", "output_gate": "full_rank"},
    "gated delta net": {"decay": "head"},
    "grouped values": {"value_heads": 6, "value_head_dim": 5, "gate_rank": 7},
    "lstm": None,
}
MIXER = pytest.mark.parametrize("name", VARIANTS)


def build(name, dtype=torch.float64, seed=1):
    context = BuildContext(width=WIDTH, dtype=dtype)
    options = VARIANTS[name]
    if options is None:
        return initialize(LSTM.Config(state=16).build(context), seed)
    module = initialize(KimiDeltaAttention.Config(heads=3, head_dim=8, **options).build(context), seed)
    with torch.no_grad():  # larger than at initialisation, so that gates and convolutions matter
        for parameter_name, p in module.named_parameters():
            if p.ndim > 1:
                p.mul_(8)
            if parameter_name == "dt_bias":
                p.add_(2)
    return module


def batch_of(lengths, **options):
    return TokenBatch.from_lengths(torch.zeros(sum(lengths), dtype=torch.int64), lengths, **options)


def inputs(tokens, dtype=torch.float64, seed=3):
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def written_out(module, x):
    """One sequence, token by token, from the published equations."""
    config, w = module.config, {n: p.double() for n, p in module.named_parameters()}
    heads, keys, values = module.value_heads, module.key_width, module.value_width

    def branch(name):
        padded = F.pad((x[0] @ w[f"{name}_proj.weight"].T).T, (config.convolution - 1, 0))
        kernel = w[f"{name}_conv1d.weight"]
        y = F.silu(F.conv1d(padded[None], kernel, groups=kernel.shape[0])[0].T)
        return y.view(len(y), -1, values if name == "v" else keys)

    unit = lambda t: t / (t.square().sum(-1, keepdim=True) + 1e-6).sqrt()
    q, k, v = unit(branch("q")), unit(branch("k")), branch("v")
    q, k = (t.repeat_interleave(heads // config.heads, dim=1) for t in (q, k))
    if config.decay == "channel":
        z = (x[0] @ w["f_a_proj.weight"].T @ w["f_b_proj.weight"].T + w["dt_bias"]).view(-1, heads, keys)
    else:
        z = (x[0] @ w["f_proj.weight"].T + w["dt_bias"]).view(-1, heads, 1)
    rate = w["A_log"].exp()[:, None]
    g = -5 * torch.sigmoid(rate * z) if config.gate == "bounded" else -rate * F.softplus(z)
    beta = torch.sigmoid(x[0] @ w["b_proj.weight"].T)
    state, rows = torch.zeros(heads, keys, values, dtype=torch.float64), []
    for t in range(x.shape[1]):
        state = state * g[t].exp().expand(heads, keys)[:, :, None]
        residual = v[t] - torch.einsum("hk,hkv->hv", k[t], state)
        state = state + torch.einsum("hk,hv->hkv", beta[t, :, None] * k[t], residual)
        rows.append(torch.einsum("hk,hkv->hv", q[t] * keys**-0.5, state))
    o = torch.stack(rows)
    o = o * (o.square().mean(-1, keepdim=True) + module.o_norm.eps).rsqrt() * w["o_norm.weight"]
    if config.output_gate == "low_rank":
        gate = x[0] @ w["g_a_proj.weight"].T @ w["g_b_proj.weight"].T
    else:
        gate = x[0] @ w["g_proj.weight"].T
    return (o.flatten(1) * torch.sigmoid(gate)) @ w["o_proj.weight"].T


@pytest.mark.parametrize("name", [n for n in VARIANTS if n != "lstm"])
def test_equals_the_published_equations(name):
    module, x = build(name), inputs(70)
    assert torch.allclose(module(x, batch_of([70]))[0], written_out(module, x), atol=1e-9)


@MIXER
@pytest.mark.parametrize("lengths", [[9, 9, 9], [1, 0, 70, 3, 2, 20]])
def test_packed_equals_separate(name, lengths):
    module, x = build(name), inputs(sum(lengths))
    packed = module(x, batch_of(lengths))
    gradient = torch.autograd.grad(packed.sin().sum(), list(module.parameters()))
    pieces = [module(piece, batch_of([piece.shape[1]])) for piece in x.split(lengths, dim=1) if piece.shape[1]]
    separate = torch.cat(pieces, dim=1)
    expected = torch.autograd.grad(separate.sin().sum(), list(module.parameters()))
    assert torch.allclose(packed, separate, atol=1e-10)
    for a, b in zip(gradient, expected, strict=True):
        assert torch.allclose(a, b, atol=1e-8)


@MIXER
def test_cached_equals_uncached(name):
    """Two sequences in pieces of any size, prefill and decode in one batch, against one uncached pass each."""
    dtype = torch.float32
    module, slots = build(name, dtype), (2, 0)
    rows = [inputs(75, dtype, seed=4), inputs(90, dtype, seed=5)]
    expected = [module(row, batch_of([row.shape[1]])) for row in rows]
    cache = LayerCache(module.cache_spec(), 3, 0, dtype, "cpu")
    done, found = [0, 0], [[], []]
    with torch.no_grad():
        for piece in [(40, 3), (1, 1), (1, 64), (0, 5), (2, 1), (1, 1), (1, 1), (29, 14)]:
            x = torch.cat([row[:, a : a + n] for row, a, n in zip(rows, done, piece, strict=True)], dim=1)
            y = module(x, batch_of(piece, context_lengths=done, slots=slots), cache)
            for s, part in enumerate(y.split(piece, dim=1)):
                found[s].append(part)
                done[s] += piece[s]
    for s in range(2):
        assert done[s] == rows[s].shape[1]
        assert torch.allclose(torch.cat(found[s], dim=1), expected[s], atol=2e-5)


@MIXER
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_any_schedule_of_the_cache_equals_uncached(name, data):
    """Sequences start, continue in pieces of any size, stop and give their slot to another, several in a batch."""
    module, dtype = build(name, torch.float32), torch.float32
    cache = LayerCache(module.cache_spec(), 3, 0, dtype, "cpu")
    rows, done, outputs = {}, {}, {}
    with torch.no_grad():
        for turn in range(data.draw(st.integers(1, 5))):
            slots = data.draw(st.lists(st.integers(0, 2), min_size=1, max_size=3, unique=True))
            pieces = []
            for slot in slots:
                if slot not in rows or data.draw(st.booleans()):
                    rows[slot], done[slot], outputs[slot] = inputs(120, dtype, seed=10 * turn + slot), 0, []
                pieces.append(data.draw(st.sampled_from([1, 1, 2, 3, 5, 20])))
            x = torch.cat([rows[s][:, done[s] : done[s] + n] for s, n in zip(slots, pieces, strict=True)], dim=1)
            batch = batch_of(pieces, context_lengths=[done[s] for s in slots], slots=slots)
            for slot, part in zip(slots, module(x, batch, cache).split(pieces, dim=1), strict=True):
                outputs[slot].append(part)
                done[slot] += part.shape[1]
        for slot, row in rows.items():
            expected = module(row[:, : done[slot]], batch_of([done[slot]]))
            assert torch.allclose(torch.cat(outputs[slot], dim=1), expected, atol=2e-5)


@MIXER
def test_batch_equals_solo_and_the_slot_is_reused_clean(name):
    module, dtype = build(name, torch.float32), torch.float32
    x = inputs(12, dtype)
    cache = LayerCache(module.cache_spec(), 1, 0, dtype, "cpu")
    with torch.no_grad():
        module(inputs(30, dtype, seed=8), batch_of([30], context_lengths=[0], slots=[0]), cache)
        again = module(x, batch_of([12], context_lengths=[0], slots=[0]), cache)
    assert torch.allclose(again, module(x, batch_of([12])), atol=1e-6)


def test_initial_values_as_published():
    module = initialize(KimiDeltaAttention.Config(heads=64, head_dim=8).build(BuildContext(width=64)), 0)
    rate, dt = module.A_log.exp(), F.softplus(module.dt_bias)
    assert rate.min() >= 1 and rate.max() <= 16 and 6 < rate.mean() < 11
    assert dt.min() >= 1e-3 * 0.999 and dt.max() <= 0.1 * 1.001
    assert abs(dt.log().mean() - math.log(1e-2)) < 0.2
    bounded = initialize(KimiDeltaAttention.Config(heads=4, gate="bounded").build(BuildContext(width=64)), 0)
    assert (bounded.A_log == 0).all()
    g = bounded.log_decay(torch.randn(1, 50, 64) * 50)
    assert g.min() >= -5 and g.max() <= 0


@MIXER
def test_roles_are_complete_and_gates_do_not_decay(name):
    module = build(name, torch.bfloat16)
    roles = collect_roles(module)
    undecayed = {n for n, role in roles.items() if not role.decay}
    if name == "lstm":
        assert undecayed == {"recurrence.bias_ih_l0", "recurrence.bias_hh_l0"}
        return
    assert undecayed == {"A_log", "dt_bias"}
    assert module.A_log.dtype == module.dt_bias.dtype == torch.float32
    for key, role in roles.items():
        if role.head_blocks:
            assert sum(role.head_blocks) == dict(module.named_parameters())[key].shape[0]


@MIXER
def test_low_precision_is_finite_and_trains_every_parameter(name):
    module = build(name, torch.bfloat16)
    y = module(inputs(50, torch.bfloat16), batch_of([20, 30]))
    assert y.dtype == torch.bfloat16
    y.float().square().mean().backward()
    for parameter_name, p in module.named_parameters():
        assert torch.isfinite(p.grad).all() and p.grad.abs().max() > 0, parameter_name


@MIXER
def test_cache_size_does_not_depend_on_the_context(name):
    spec = build(name).cache_spec()
    assert spec.bytes_per_token(torch.bfloat16) == 0 and spec.bytes_fixed(torch.bfloat16) > 0


def test_config_errors_name_the_field():
    for options, named in [({"heads": 0}, "heads"), ({"value_heads": 3, "heads": 2}, "value_heads"),
                           ({"lower_bound": 1.0}, "lower_bound"), ({"gate": "soft"}, "gate")]:  # fmt: skip
        with pytest.raises(ConfigError, match=named):
            from_dict(MIXERS.config_class("delta_attention", "mixer"), options)
    with pytest.raises(ValueError, match="heads"):
        KimiDeltaAttention.Config(heads=5).build(BuildContext(width=24))

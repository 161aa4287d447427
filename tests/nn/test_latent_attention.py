"""Latent attention: against its definition, against transformers, and its forms against each other."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.initialize import collect_roles
from triscale.nn.latent_attention import LatentAttention
from triscale.ops.yarn import Yarn

WIDTH = 24
CONFIGS = {
    "nope": {},
    "low-rank query": {"q_lora_rank": 14},
    "gated": {"q_lora_rank": 14, "output_gate": True},
    "rotary": {"rope_theta": 50000.0},
    "yarn": {"rope_theta": 50000.0, "yarn": Yarn(factor=32, original_context=64)},
    "no shared key": {"qk_rope_head_dim": 0},
    "value wider than key": {"v_head_dim": 40},
}


def build(name="nope", dtype=torch.float64, seed=0):
    sizes = {"heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 12, "qk_rope_head_dim": 8, "v_head_dim": 6}
    module = LatentAttention.Config(**{**sizes, **CONFIGS[name]}).build(BuildContext(width=WIDTH, dtype=dtype))
    g = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in module.parameters():
            noise = torch.randn(p.shape, generator=g, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if p.ndim == 1 else noise * p.shape[-1] ** -0.5)
    return module


def inputs(tokens, seed=3):
    return torch.randn(1, tokens, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def batch_of(lengths, **options):
    return TokenBatch.from_lengths(torch.zeros(sum(lengths), dtype=torch.int64), lengths, **options)


class Cache:
    """The cache protocol in its simplest form: one growing tensor per name and slot."""

    def __init__(self):
        self.store = {}

    def append(self, batch, **values):
        self.batch, start = batch, 0
        for slot, context, length in zip(batch.slots, batch.context_lengths, batch.lengths, strict=True):
            for name, value in values.items():
                old = self.store.get((slot, name), value[:0])[:context]
                assert len(old) == context
                self.store[slot, name] = torch.cat((old, value[start : start + length]))
            start += length

    def read(self, name, index):
        return self.store[self.batch.slots[index], name]


def definition(m, x):
    """One sequence, head by head, straight from the equations."""
    c = m.config
    norm = lambda v, layer: v * torch.rsqrt(v.square().mean(-1, keepdim=True) + 1e-6) * layer.weight
    q = x @ m.q_proj.weight.T if c.q_lora_rank is None else (
        norm(x @ m.q_a_proj.weight.T, m.q_a_layernorm) @ m.q_b_proj.weight.T)  # fmt: skip
    kv = x @ m.kv_a_proj_with_mqa.weight.T
    latent, shared = norm(kv[:, : m.latent], m.kv_a_layernorm), kv[:, m.latent :]

    def rotate(v):
        if not c.rope_theta:
            return v
        tables = m._tables(batch_of([len(x)]))
        turn = torch.complex(*(t[:, 0].double() for t in tables))
        pairs = torch.view_as_complex(v.reshape(len(v), -1, 2).contiguous())
        return torch.view_as_real(pairs * turn).flatten(-2)

    out = []
    for head in range(m.heads):
        qh = q[:, head * (m.nope + m.rope) : (head + 1) * (m.nope + m.rope)]
        w = m.kv_b_proj.weight[head * (m.nope + m.value) : (head + 1) * (m.nope + m.value)]
        k, v = latent @ w[: m.nope].T, latent @ w[m.nope :].T
        scores = (qh[:, : m.nope] @ k.T + rotate(qh[:, m.nope :]) @ rotate(shared).T) * m.scale
        causal = torch.ones_like(scores).tril().bool()
        out.append(torch.softmax(scores.masked_fill(~causal, -torch.inf), -1) @ v)
    o = torch.cat(out, dim=-1)
    if m.g_proj is not None:
        o = o * torch.sigmoid(x @ m.g_proj.weight.T)
    return o @ m.o_proj.weight.T


@pytest.mark.parametrize("name", CONFIGS)
def test_equals_definition(name):
    m, x = build(name), inputs(11)
    torch.testing.assert_close(m(x, batch_of([11]))[0], definition(m, x[0]), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_packed_equals_separate_with_gradients(name):
    m, lengths = build(name), [5, 1, 7, 7]
    x = inputs(20).requires_grad_()
    packed = m(x, batch_of(lengths))
    apart = torch.cat([m(piece, batch_of([piece.shape[1]])) for piece in x.split(lengths, dim=1)], dim=1)
    torch.testing.assert_close(packed, apart)
    weight = torch.randn_like(packed)
    leaves = [x, *m.parameters()]
    got, wanted = (torch.autograd.grad((o * weight).sum(), leaves) for o in (packed, apart))
    for a, b in zip(got, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@given(
    name=st.sampled_from(sorted(CONFIGS)),
    cuts=st.lists(st.integers(1, 6), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=30, deadline=None)
def test_any_chunking_through_the_cache_equals_one_pass(name, cuts, seed):
    m, total = build(name), sum(cuts)
    x, cache, outputs, start = inputs(total, seed), Cache(), [], 0
    for length in cuts:
        batch = batch_of([length], context_lengths=[start])
        outputs.append(m(x[:, start : start + length], batch, cache))
        start += length
    torch.testing.assert_close(torch.cat(outputs, 1), m(x, batch_of([total])), rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", CONFIGS)
def test_absorbed_form_equals_expanded_form(name):
    m, x = build(name), inputs(9)
    q, latent, shared = m._project(x, batch_of([9]))
    torch.testing.assert_close(
        m._absorbed(q[0], latent[0], shared[0]), m._expanded(q, latent, shared, batch_of([9]))[0], rtol=1e-9, atol=1e-10
    )


def test_batched_decode_equals_each_sequence_alone():
    m, lengths = build("rotary"), [4, 6, 1]
    x, new = inputs(11), inputs(3, seed=8)
    together = Cache()
    m(x, batch_of(lengths), together)
    out = m(new, batch_of([1, 1, 1], context_lengths=lengths), together)
    for s, (piece, context) in enumerate(zip(x.split(lengths, 1), lengths, strict=True)):
        alone = Cache()
        m(piece, batch_of([context]), alone)
        torch.testing.assert_close(
            m(new[:, s : s + 1], batch_of([1], context_lengths=[context]), alone)[0, 0], out[0, s]
        )


def test_mixed_prefill_and_decode_share_a_batch():
    m, cache, x = build(), Cache(), inputs(9)
    m(x[:, :4], batch_of([4], slots=[0]), cache)
    both = torch.cat((x[:, 4:5], x[:, :6]), 1)
    out = m(both, batch_of([1, 6], context_lengths=[4, 0], slots=[0, 1]), cache)
    whole = m(x, batch_of([9]))
    torch.testing.assert_close(out[:, :1], whole[:, 4:5])
    torch.testing.assert_close(out[:, 1:], whole[:, :6])


def test_cache_holds_only_latent_and_shared_key():
    spec = build().cache_spec()
    assert spec.bytes_per_token(torch.bfloat16) == 2 * (10 + 8) and spec.bytes_fixed(torch.float32) == 0


@pytest.mark.parametrize("name", CONFIGS)
def test_roles_cover_everything_and_clip_scales_exactly_one_head(name):
    m, x = build(name), inputs(6)
    roles, gamma, head = collect_roles(m), 0.37, 1

    def logits():
        q, latent, shared = m._project(x, batch_of([6]))
        k, _ = m._expand(latent, shared)
        return torch.einsum("bqhd,bkhd->hqk", q, k)

    before, values = logits(), m._expand(*m._project(x, batch_of([6]))[1:])[1]
    with torch.no_grad():
        for key, role in roles.items():
            for rows in role.clip:
                if rows.head == head:
                    m.get_parameter(key)[rows.start : rows.stop] *= gamma**rows.power
    after = logits()
    scale = torch.ones(3, 1, 1, dtype=torch.float64)
    scale[head] = gamma
    torch.testing.assert_close(after, before * scale)
    torch.testing.assert_close(m._expand(*m._project(x, batch_of([6]))[1:])[1], values)
    for key, role in roles.items():
        assert not role.blocks or sum(role.blocks) == m.get_parameter(key).shape[0]
        assert not role.head_blocks or sum(role.head_blocks) == m.get_parameter(key).shape[0]


def test_published_sizes_of_one_layer():
    """Parameters per mixer: Kimi Linear 48B, Kimi K2, Kimi K3 (gated)."""
    published = {"kv_lora_rank": 512, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128}
    cases = [
        (2304, {"heads": 32}, 29_114_880),
        (7168, {"heads": 64, "q_lora_rank": 1536}, 101_124_096),
        (7168, {"heads": 96, "q_lora_rank": 1536, "output_gate": True}, 232_196_096),
    ]
    for width, own, count in cases:
        m = LatentAttention.Config(**published, **own).build(BuildContext(width=width, device="meta"))
        assert sum(p.numel() for p in m.parameters()) == count
        assert m.cache_spec().bytes_per_token(torch.bfloat16) == 2 * 576


def test_bad_values_name_the_field():
    with pytest.raises(ValueError, match="heads"):
        LatentAttention.Config(heads=0)
    with pytest.raises(ValueError, match="yarn"):
        LatentAttention.Config(yarn=Yarn(factor=2.0))
    with pytest.raises(ValueError, match="even"):
        LatentAttention.Config(qk_rope_head_dim=7, rope_theta=1e4)


@pytest.mark.parametrize("yarn", [None, Yarn(factor=32.0, original_context=512)])
@pytest.mark.parametrize("q_rank", [None, 14])
def test_agrees_with_transformers(yarn, q_rank):
    pytest.importorskip("transformers")
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RotaryEmbedding

    rope = {"rope_type": "default", "rope_theta": 50000.0}
    if yarn:
        rope = {"rope_type": "yarn", "rope_theta": 50000.0, "factor": 32.0, "original_max_position_embeddings": 512,
                "beta_fast": 32, "beta_slow": 1, "mscale": 1.0, "mscale_all_dim": 1.0}  # fmt: skip
    hf_config = DeepseekV3Config(
        hidden_size=WIDTH, num_attention_heads=3, num_key_value_heads=3, q_lora_rank=q_rank, kv_lora_rank=10,
        qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=6, rope_parameters=rope, max_position_embeddings=16384,
    )  # fmt: skip
    hf_config._attn_implementation = "eager"
    peer = DeepseekV3Attention(hf_config, layer_idx=0).eval()
    config = LatentAttention.Config(
        heads=3, q_lora_rank=q_rank, kv_lora_rank=10, qk_nope_head_dim=12, qk_rope_head_dim=8, v_head_dim=6,
        rope_theta=50000.0, yarn=yarn,
    )  # fmt: skip
    ours = config.build(BuildContext(width=WIDTH))
    ours.load_state_dict(peer.state_dict())
    assert ours.scale == pytest.approx(peer.scaling)
    x = inputs(40).float()
    mask = torch.full((40, 40), -torch.inf).triu(1)[None, None]
    position = DeepseekV3RotaryEmbedding(hf_config)(x, torch.arange(40)[None])
    expected = peer(x, position_embeddings=position, attention_mask=mask)[0]
    torch.testing.assert_close(ours(x, batch_of([40])), expected, rtol=1e-4, atol=1e-5)


def test_config_is_hashable_and_frozen():
    config = LatentAttention.Config()
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.heads = 2

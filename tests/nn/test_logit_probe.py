"""The streamed maximum of attention logits equals that of the whole matrix."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.grouped_query_attention import GroupedQueryAttention
from triscale.nn.initialize import initialize
from triscale.nn.logit_probe import observe
from triscale.ops import max_logits


def whole(q, k, scale, lengths, causal=True, mask=None):
    """The definition: every sequence's full logit matrix."""
    heads, group = q.shape[1], q.shape[1] // k.shape[1]
    best = torch.full((heads,), -torch.inf, dtype=torch.float64)
    start = 0
    for index, length in enumerate(lengths):
        rows = slice(start, start + length)
        logits = scale * torch.einsum("ihd,jhd->hij", q[rows].double(), k[rows].double().repeat_interleave(group, 1))
        if causal:
            logits = logits.masked_fill(~torch.ones(length, length, dtype=torch.bool).tril(), -torch.inf)
        if mask is not None:
            logits = logits.masked_fill(~mask[index].expand(heads, -1, -1), -torch.inf)
        if length:
            best = torch.maximum(best, logits.amax((1, 2)))
        start += length
    return best


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(0, 13), min_size=1, max_size=5), key_heads=st.integers(1, 3),
    group=st.integers(1, 3), block=st.integers(1, 16), causal=st.booleans(), seed=st.integers(0, 99),
)  # fmt: skip
def test_streamed_equals_whole(lengths, key_heads, group, block, causal, seed):
    generator = torch.Generator().manual_seed(seed)
    q = torch.randn(sum(lengths), key_heads * group, 5, generator=generator, dtype=torch.float64)
    k = torch.randn(sum(lengths), key_heads, 5, generator=generator, dtype=torch.float64)
    expected = whole(q, k, 0.3, lengths, causal)
    assert torch.allclose(max_logits(q, k, 0.3, lengths=lengths, causal=causal, block=block), expected, atol=1e-12)


@pytest.mark.parametrize("additive", [False, True])
def test_masks(additive):
    lengths, heads = [9, 9], 4
    q, k = torch.randn(18, heads, 5, dtype=torch.float64), torch.randn(18, 2, 5, dtype=torch.float64)
    valid = torch.rand(2, 1, 9, 9) > 0.4
    mask = torch.where(valid, 0.0, torch.finfo(torch.float32).min) if additive else valid
    got = max_logits(q, k, 1.0, lengths=lengths, mask=mask, block=4)
    assert torch.allclose(got, whole(q, k, 1.0, lengths, mask=valid))
    nothing = max_logits(q, k, 1.0, lengths=lengths, mask=torch.zeros(2, 1, 9, 9, dtype=torch.bool))
    assert (nothing == -torch.inf).all()


def test_never_holds_the_matrix():
    """A length whose full matrix would take 4 GB runs in blocks."""
    q = torch.randn(32768, 1, 4)
    assert torch.isfinite(max_logits(q, q, 1.0, block=16)).all()


def test_refuses_what_it_cannot_mean():
    q = torch.randn(4, 2, 3)
    with pytest.raises(ValueError, match="negative"):
        max_logits(q, q, -1.0)
    with pytest.raises(ValueError, match="sum"):
        max_logits(q, q, 1.0, lengths=[3])


def attention(**settings):
    module = GroupedQueryAttention.Config(heads=4, head_dim=8, **settings).build(
        BuildContext(width=16, layer=0, depth=1)
    )
    initialize(module, seed=0)
    return module.train()


def test_mixer_records_over_micro_batches_and_only_when_asked():
    module = attention(kv_heads=2)
    batches = [TokenBatch.from_lengths(torch.zeros(12, dtype=torch.long), lengths) for lengths in ([5, 7], [12])]
    inputs = [torch.randn(1, 12, 16) * size for size in (3.0, 1.0)]
    module(inputs[0], batches[0])
    assert (module.max_logits == -torch.inf).all()
    module.record_max_logits = True
    first = None
    for x, batch in zip(inputs, batches, strict=True):
        module(x, batch)
        first = module.max_logits.clone() if first is None else first
    separate = []
    for x, batch in zip(inputs, batches, strict=True):
        module.max_logits.fill_(-torch.inf)
        module(x, batch)
        separate.append(module.max_logits.clone())
    assert torch.equal(first, separate[0])
    module.max_logits.fill_(-torch.inf)
    for x, batch in zip(inputs, batches, strict=True):
        module(x, batch)
    assert torch.equal(module.max_logits, torch.maximum(*separate))
    module.eval()(inputs[0] * 100, batches[0])
    assert torch.equal(module.max_logits, torch.maximum(*separate))


class Holder(nn.Module):
    def __init__(self, heads):
        super().__init__()
        self.register_buffer("max_logits", torch.full((heads,), -torch.inf))


def test_nan_is_kept_for_its_head_alone():
    holder, batch = Holder(2), TokenBatch.from_lengths(torch.zeros(6, dtype=torch.long), [6])
    q = torch.randn(1, 6, 2, 4)
    observe(holder, q, q, 0.5, batch)
    before = holder.max_logits.clone()
    broken = q * 0
    broken[..., 1, :] = torch.nan
    observe(holder, broken, q, 0.5, batch)
    assert holder.max_logits[0] == before[0] and holder.max_logits[1].isnan()
    observe(holder, q, q, 0.5, batch)
    assert holder.max_logits[1].isnan()


def test_no_graph_is_kept():
    holder = Holder(2)
    q = torch.randn(1, 6, 2, 4, requires_grad=True)
    observe(holder, q, q, 0.5, TokenBatch.from_lengths(torch.zeros(6, dtype=torch.long), [6]))
    assert not holder.max_logits.requires_grad

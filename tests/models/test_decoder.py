"""The decoder: packed = separate, cached = uncached, and its loss."""

from __future__ import annotations

import pytest
import torch

from triscale.config import from_dict
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_reference

MIXERS = {
    "gqa": {"kind": "grouped_query_attention", "heads": 4, "kv_heads": 2},
    "gqa-norm-nope": {"kind": "grouped_query_attention", "heads": 2, "qk_norm": True, "rope_theta": 0.0},
    "mla": {"kind": "latent_attention", "heads": 2},
    "hybrid": {"kind": "hybrid", "pattern": "1:1", "full": {"kind": "latent_attention", "heads": 2},
               "linear": {"kind": "delta_attention", "heads": 2, "head_dim": 16}},
}  # fmt: skip
RESIDUALS = [{"kind": "standard"}, {"kind": "attention"}, {"kind": "block_attention", "block": 2}]


def build(mixer, residual=RESIDUALS[0], **more):
    tree = {"width": 32, "depth": 3, "vocabulary": 61, "mixer": MIXERS[mixer], "residual": residual, **more}
    return from_dict(Decoder.Config, tree).build(seed=1).double()


def sequences(lengths, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(0, 61, (n,), generator=generator) for n in lengths]


def loss_and_gradients(model, parts):
    model.zero_grad()
    total = 0.0
    for part in parts:
        loss = model(part)
        loss.backward()
        total += float(loss.detach())
    return total, {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


def training_batch(documents):
    tokens = torch.cat(documents)
    weights = torch.linspace(0.5, 1.5, len(tokens), dtype=torch.float64)
    return TokenBatch.from_lengths(
        tokens, [len(d) for d in documents], targets=(tokens + 1) % 61, loss_weights=weights
    )  # fmt: skip


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("residual", RESIDUALS, ids=lambda r: r["kind"])
def test_packed_equals_separate(mixer, residual):
    model = build(mixer, residual)
    documents = sequences([1, 7, 7, 2, 33])
    packed = training_batch(documents)
    separate, start = [], 0
    for document in documents:
        stop = start + len(document)
        separate.append(
            TokenBatch.from_lengths(
                document, [len(document)],
                targets=packed.targets[start:stop], loss_weights=packed.loss_weights[start:stop],
            )
        )  # fmt: skip
        start = stop
    loss, gradients = loss_and_gradients(model, [packed])
    loss_each, gradients_each = loss_and_gradients(model, separate)
    assert loss == pytest.approx(loss_each, rel=1e-9)
    for name in gradients:
        torch.testing.assert_close(gradients[name], gradients_each[name], rtol=1e-5, atol=1e-7, msg=name)


@pytest.mark.parametrize("mixer", MIXERS)
@torch.no_grad()
def test_cached_equals_uncached_and_batch_equals_solo(mixer):
    model = build(mixer, RESIDUALS[2]).eval()
    texts = sequences([19, 11, 26])
    whole = [model(text[None])[0] for text in texts]
    cache = model.new_cache(4, 32)
    slots, cut = [2, 0, 3], [5, 1, 17]
    batch = cache.batch([text[:c].tolist() for text, c in zip(texts, cut, strict=True)], slots)
    model(batch, cache)
    cache.advance(batch)
    for step in range(4):  # one token each, then two, decoded together
        count = 1 if step < 3 else 2
        pieces = [text[c : c + count].tolist() for text, c in zip(texts, cut, strict=True)]
        batch = cache.batch(pieces, slots)
        logits = model(batch, cache, output="last_logits")
        cache.advance(batch)
        cut = [c + count for c in cut]
        for row, (reference, c) in enumerate(zip(whole, cut, strict=True)):
            torch.testing.assert_close(logits[row].double(), reference[c - 1].double(), rtol=1e-4, atol=1e-5)


@torch.no_grad()
def test_copied_cache_slot_continues_like_the_original():
    model = build("hybrid").eval()
    text = sequences([12])[0].tolist()
    cache = model.new_cache(2, 16)
    batch = cache.batch([text[:9]], [0])
    model(batch, cache)
    cache.advance(batch)
    cache.copy(0, 1)
    rows = model(cache.batch([text[9:], text[9:]], [0, 1]), cache, output="last_logits")
    assert torch.equal(rows[0], rows[1])


@pytest.mark.parametrize("mixer", MIXERS)
@pytest.mark.parametrize("residual", RESIDUALS, ids=lambda r: r["kind"])
def test_bf16_autocast_stays_close_to_fp32_in_training_and_inference(mixer, residual):
    model = build(mixer, residual).float()
    batch = training_batch(sequences([17, 40]))
    batch.loss_weights = batch.loss_weights.float()
    exact, gradients = loss_and_gradients(model, [batch])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss, narrow = loss_and_gradients(model, [batch])
        with torch.no_grad():
            evaluated = float(model.eval()(batch))
    assert loss == pytest.approx(exact, rel=5e-3) and evaluated == pytest.approx(exact, rel=5e-3)
    for name, value in gradients.items():
        assert narrow[name].isfinite().all()
        assert (narrow[name] - value).norm() <= 0.1 * value.norm() + 1e-3, name


def test_linear_cross_entropy_agrees_with_its_definition():
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(70, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(33, 12, generator=generator, dtype=torch.float64, requires_grad=True)
    targets = torch.randint(0, 33, (70,), generator=generator)
    weights = torch.rand(70, generator=generator, dtype=torch.float64)
    weights[:3] = 0
    assert torch.autograd.gradcheck(lambda h, w: linear_cross_entropy(h, w, targets, weights), (hidden, weight))
    results = []
    for function in (linear_cross_entropy, linear_cross_entropy_reference):
        loss = function(hidden, weight, targets, weights) * 1.7
        results.append((loss, *torch.autograd.grad(loss, (hidden, weight))))
    for a, b in zip(*results, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)


def test_untied_head_and_first_dense_layers_are_built():
    model = build("gqa", tied_head=False, first_dense=1, dense_feed_forward={"kind": "swiglu", "hidden": 20})
    assert model.head.weight is not model.embedding.weight
    assert model.layers[0].feed_forward.hidden == 20 != model.layers[1].feed_forward.hidden

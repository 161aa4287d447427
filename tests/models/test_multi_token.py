"""Multi-token prediction: alignment, boundaries, gradients without a change of the loss, and drafting."""

import pytest
import torch
import torch.nn.functional as F

from triscale.config import from_dict
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.nn.initialize import collect_roles

VOCABULARY = 23


def build(multi_token=True, **options):
    values = {
        "width": 16,
        "depth": 2,
        "vocabulary": VOCABULARY,
        "mixer": {"kind": "grouped_query_attention", "heads": 2},
    }
    if multi_token:
        values["multi_token"] = {"weight": 0.3}
    return from_dict(Decoder.Config, {**values, **options}).build(dtype=torch.float64)


def batch_of(*lengths, seed=0):
    g = torch.Generator().manual_seed(seed)
    tokens = torch.randint(0, VOCABULARY, (sum(lengths),), generator=g)
    targets = tokens.roll(-1)
    weights = torch.rand(len(tokens), generator=g)
    weights[torch.tensor(lengths).cumsum(0) - 1] = 0  # the last token of a document predicts nothing
    return TokenBatch.from_lengths(tokens, lengths, targets=targets, loss_weights=weights)


def further_loss(model, batch):
    hidden = model(batch, output="hidden")[None]
    return model.multi_token.loss(hidden, batch, model.embedding, model.head.weight)


def test_equals_a_loop_over_positions():
    model, batch = build(), batch_of(5, 1, 2, 7)
    hidden, m = model(batch, output="hidden"), model.multi_token
    total, start = torch.zeros((), dtype=torch.float64), 0
    for length in batch.lengths:
        places = range(start, start + length)
        start += length
        if length < 2:
            continue
        pairs = [(m.enorm(model.embedding(batch.tokens[0, i + 1])), m.hnorm(hidden[i])) for i in places[:-1]]
        x = torch.stack([m.eh_proj(torch.cat(pair)) for pair in pairs])[None]
        one = TokenBatch.from_lengths(torch.zeros(length - 1, dtype=torch.int64), [length - 1])
        logits = F.linear(m.norm(m.layer(x, one)), model.head.weight)[0]
        for row, i in enumerate(places[:-1]):
            total = total + batch.loss_weights[i + 1] * F.cross_entropy(logits[row], batch.targets[i + 1])
    torch.testing.assert_close(further_loss(model, batch), total)


def test_joins_the_gradient_in_training_without_changing_the_loss():
    batch = batch_of(6, 9)
    plain, extra = build(multi_token=False), build()
    assert torch.equal(plain.embedding.weight, extra.embedding.weight)
    torch.testing.assert_close(extra(batch), plain(batch))
    extra(batch).backward()
    grads = {n: p.grad.clone() for n, p in extra.named_parameters()}
    extra.zero_grad()
    (plain(batch)).backward()
    (0.3 * further_loss(extra, batch)).backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(grads[name], p.grad + extra.get_parameter(name).grad)
    assert all(g.abs().sum() > 0 for n, g in grads.items() if "multi_token" in n)


def test_evaluation_never_runs_it():
    model, batch = build().eval(), batch_of(6, 9)
    model.multi_token.forward = None
    assert torch.equal(model(batch), model(batch))
    with torch.no_grad():
        model.train()(batch)


def test_packed_equals_separate():
    model, batch = build(), batch_of(5, 4, 1)
    parts, start = [], 0
    for n in batch.lengths:
        piece = slice(start, start + n)
        one = TokenBatch.from_lengths(
            batch.tokens[0, piece], [n], targets=batch.targets[piece], loss_weights=batch.loss_weights[piece]
        )
        parts.append(further_loss(model, one))
        start += n
    torch.testing.assert_close(further_loss(model, batch), sum(parts))


@torch.no_grad()
def test_drafting_through_its_cache_equals_one_pass():
    model, tokens = build().eval(), torch.randint(0, VOCABULARY, (1, 9))
    hidden = model(TokenBatch.from_rows(tokens), output="hidden")[None]
    following = TokenBatch.from_lengths(tokens[0, 1:], [8])
    m = model.multi_token
    whole = m(hidden[:, :8], following, model.embedding)[0] @ model.head.weight.T
    cache, rows = m.new_cache(1, 16), []
    for i in range(8):
        one = TokenBatch.from_lengths(tokens[0, i + 1 : i + 2], [1], context_lengths=[i])
        rows.append(m.draft_logits(hidden[:, i : i + 1], one, model.embedding, model.head.weight, cache))
    torch.testing.assert_close(torch.cat(rows), whole)


@pytest.mark.parametrize("mixer", ["latent_attention", "hybrid"])
def test_any_mixer_experts_and_depth_attention(mixer):
    model = build(mixer={"kind": mixer}, residual={"kind": "block_attention", "block": 2},
                  feed_forward={"kind": "mixture_of_experts", "experts": 4})  # fmt: skip
    collect_roles(model)
    model.float()
    model(batch_of(6, 9)).backward()
    assert all(p.grad is not None for n, p in model.named_parameters() if not n.startswith("layers.0.mixer_residual"))
    assert type(model.multi_token.layer.mixer).__name__ == "LatentAttention"


def test_the_trainers_scale_reaches_the_auxiliary_losses_of_the_further_layer():
    """Every term of the objective carries it, so the whole gradient is proportional to it."""
    feed_forward = {"kind": "mixture_of_experts", "experts": 4, "hidden": 8, "sequence_loss": 0.5}
    gradients = []
    for scale in (1.0, 0.25):
        model, batch = build(feed_forward=feed_forward).train(), batch_of(6, 9)
        batch.memo["loss_scale"] = scale
        (model(batch) * scale).backward()
        gradients.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    assert any("multi_token.layer.feed_forward.gate" in name for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient * 0.25, msg=lambda m, n=name: f"{n}: {m}")

"""Sampling text, one token at a time, through the model's cache."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from triscale.data.tokenizer import StreamDecoder

from .load import LoadedRun


def sample(logits: Tensor, temperature: float, top_p: float, generator: torch.Generator) -> int:
    """One token id from fp32 ``logits`` [V]; temperature 0 takes the largest."""
    if temperature == 0:
        return int(logits.argmax())
    probabilities, order = torch.softmax(logits.double() / temperature, -1).sort(descending=True)
    probabilities[probabilities.cumsum(0) - probabilities >= top_p] = 0.0
    return int(order[torch.multinomial(probabilities, 1, generator=generator)])


@torch.no_grad()
def generate_ids(
    loaded: LoadedRun, prompt: list[int], count: int, *, temperature: float = 0.8, top_p: float = 0.95, seed: int = 0
) -> Iterator[int]:
    """Ids that continue ``prompt`` (not empty), until ``count`` or the end-of-text token."""
    model, device = loaded.model, loaded.model.embedding.weight.device
    generator = torch.Generator().manual_seed(seed)
    cache = model.new_cache(1, len(prompt) + count)
    fresh = list(prompt)
    for _ in range(count):
        batch = cache.batch([fresh], [0], device)
        logits = model(batch, cache, output="last_logits")[0]
        cache.advance(batch)
        token = sample(logits.float().cpu(), temperature, top_p, generator)
        if token == loaded.tokenizer.eos:
            return
        yield token
        fresh = [token]


def generate_text(loaded: LoadedRun, prompt: str, count: int, **sampling) -> Iterator[str]:
    """Pieces of text that continue ``prompt``; joined they are the decoded whole."""
    tokenizer = loaded.tokenizer
    start = [tokenizer.bos] if tokenizer.bos is not None else []
    decoder = StreamDecoder(tokenizer)
    for token in generate_ids(loaded, start + tokenizer.encode(prompt), count, **sampling):
        yield decoder.feed(token)
    yield decoder.flush()

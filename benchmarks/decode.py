"""Decoding with Kimi Delta Attention: time a token and bytes of state at positions 1 to 1,000,000.

The peer is softmax attention of the same width reading a key-value cache of that length. KDA's step touches a state of
fixed size, so ``flat_P`` (time at position 1 over time at position P) should stay near 1 and ``state_bytes`` the same;
``attention_P`` is the peer's time over ours.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

from _measure import arguments, interleave, report
from triscale.ops import gated_delta_rule, gated_delta_rule_step

HEADS, WIDTH = 4, 64
POSITIONS = (1, 1_000, 10_000, 100_000, 1_000_000)
STEPS = 64  # steps a measurement
BLOCK = 65536  # tokens a prefill call


def token(generator: torch.Generator) -> list[torch.Tensor]:
    q, k = (F.normalize(torch.randn(1, 1, HEADS, WIDTH, generator=generator), dim=-1) for _ in range(2))
    v = torch.randn(1, 1, HEADS, WIDTH, generator=generator)
    return [q, k, v, -0.1 * torch.rand(1, 1, HEADS, WIDTH, generator=generator), torch.rand(1, 1, HEADS)]


def at_position(position: int) -> torch.Tensor:
    """A state that has seen ``position`` tokens, prefilled in blocks."""
    generator = torch.Generator().manual_seed(0)
    state: torch.Tensor | None = None
    for start in range(0, position, BLOCK):
        block = min(BLOCK, position - start)
        leaves = [x.expand(1, block, *x.shape[2:]) for x in token(generator)]
        _, state = gated_delta_rule(*leaves, initial_state=state, output_final_state=True)
    assert state is not None
    return state


def main() -> None:
    options = arguments(__doc__ or "", repeats=15)
    tokens = token(torch.Generator().manual_seed(1))
    candidates, state_bytes = {}, {}
    for position in POSITIONS:
        state = at_position(position)

        def step(state: torch.Tensor = state) -> None:
            for _ in range(STEPS):
                gated_delta_rule_step(*tokens, state)

        candidates[f"kda_{position}"] = step
        state_bytes[position] = state.untyped_storage().nbytes()
        keys, values = (torch.randn(1, HEADS, position, WIDTH) for _ in range(2))

        def attend(keys: torch.Tensor = keys, values: torch.Tensor = values) -> None:
            F.scaled_dot_product_attention(tokens[0].transpose(1, 2), keys, values)

        candidates[f"attention_{position}"] = attend
    medians = interleave(candidates, options.repeats, warmup=2)
    for position in POSITIONS:
        medians[f"kda_{position}"] /= STEPS
    ratios = {f"flat_{p}": medians["kda_1"] / medians[f"kda_{p}"] for p in POSITIONS[1:]}
    ratios |= {f"attention_{p}": medians[f"attention_{p}"] / medians[f"kda_{p}"] for p in POSITIONS}
    ratios["state_bytes"] = state_bytes[POSITIONS[0]] / state_bytes[POSITIONS[-1]]
    cache = 2 * HEADS * WIDTH * 4
    meta = {
        "heads": HEADS, "key_width": WIDTH, "value_width": WIDTH, "state_bytes": state_bytes[POSITIONS[-1]],
        "attention_cache_bytes_per_token": cache, "tokens_where_caches_are_equal": state_bytes[1] // cache,
    }  # fmt: skip
    report(meta, medians, ratios, options.json)


if __name__ == "__main__":
    main()

"""What block Attention Residuals cost: one training step and one decode step against the plain residual.

The same decoder twice (8 layers, block of 4 sublayers), differing in the residual connection alone, at width 256 and at
width 1,024 (the share falls with width), over softmax attention and over the 3:1 hybrid. A ratio is plain / AttnRes:
0.87 means that the step takes 15 % longer; it is the median over neighbouring pairs of runs (``meta`` holds their
quartiles). ``autograd_mixing`` compares the operator with autograd of its definition.
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from _measure import arguments, compare, interleave, report
from triscale.config import from_dict
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.ops.depth_attention import mix_over_depth, mix_over_depth_reference

DEPTH, BLOCK, VOCABULARY, CONTEXT = 8, 4, 4096, 64
MIXERS = {
    "attention": lambda width: {"kind": "grouped_query_attention", "heads": width // 64},
    "hybrid": lambda width: {
        "kind": "hybrid",
        "linear": {"kind": "delta_attention", "heads": width // 64},
        "full": {"kind": "latent_attention", "heads": width // 64, "qk_nope_head_dim": 48, "v_head_dim": 64},
    },
}
RESIDUALS = {"plain": {"kind": "standard"}, "attnres": {"kind": "block_attention", "block": BLOCK}}


def build(width: int, mixer: str, residual: str) -> Decoder:
    values = {"width": width, "depth": DEPTH, "vocabulary": VOCABULARY, "residual": RESIDUALS[residual]}
    model = from_dict(Decoder.Config, {**values, "mixer": MIXERS[mixer](width)}).build(seed=0)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if name.endswith("residual.proj.weight"):
                parameter.normal_(std=0.1)
    return model


def training(model: Decoder, rows: int, length: int) -> Callable:
    tokens = torch.randint(0, VOCABULARY, (rows, length), generator=torch.Generator().manual_seed(0))
    batch = TokenBatch.from_rows(tokens, None, tokens.roll(-1, 1), torch.ones(tokens.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    model.train()

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        (model(batch) / tokens.numel()).backward()
        optimizer.step()

    return step


def decoding(model: Decoder, steps: int = 16) -> Callable:
    """``steps`` single-token steps of one sequence behind a cached context."""
    model.eval()
    cache = model.new_cache(1, CONTEXT + steps)
    prompt = cache.batch([[1] * CONTEXT], [0])

    @torch.inference_mode()
    def run() -> None:
        cache.context[0] = CONTEXT
        for _ in range(steps):
            batch = cache.batch([[1]], [0])
            model(batch, cache, "last_logits")
            cache.advance(batch)

    with torch.inference_mode():
        model(prompt, cache, "last_logits")
    return run


def mixing(function: Callable) -> Callable:
    """The operator alone: 5 sources of 2,048 tokens at width 256, forward and backward."""
    g = torch.Generator().manual_seed(0)
    sources = [torch.randn(1, 2048, 256, generator=g).requires_grad_() for _ in range(5)]
    query, weight = torch.randn(256, generator=g).requires_grad_(), torch.ones(256).requires_grad_()
    upstream = torch.randn(1, 2048, 256, generator=g)
    leaves = [*sources, query, weight]
    return lambda: torch.autograd.grad(function(sources, query, weight, 1e-5), leaves, upstream)


def main() -> None:
    options = arguments(__doc__ or "", repeats=9)
    medians: dict[str, float] = {}
    ratios: dict[str, float] = {}
    shares: dict[str, object] = {}
    for width, rows, length in ((256, 2, 512), (1024, 1, 256)):
        for mixer in MIXERS:
            models = {residual: build(width, mixer, residual) for residual in RESIDUALS}
            repeats = options.repeats if width == 256 else max(5, options.repeats // 3)
            for task, make in (("decode", decoding), ("training", lambda m, r=rows, n=length: training(m, r, n))):
                # decode steps are short: more pairs of them
                pairs = 5 * repeats if task == "decode" and width == 256 else repeats
                plain, attnres, quartiles = compare(make(models["plain"]), make(models["attnres"]), pairs)
                print(f"measured {task} at width {width} over {mixer}", file=sys.stderr)
                key = f"{task}_{width}" if mixer == "attention" else f"{task}_{mixer}_{width}"
                medians |= {f"{key}_plain": plain, f"{key}_attnres": attnres}
                ratios[key] = 1 / quartiles[1]
                low, middle, high = (100 * (ratio - 1) for ratio in quartiles)
                shares |= {f"{key}_extra_percent": middle, f"{key}_extra_percent_quartiles": [low, high]}
    alone = interleave(
        {"operator": mixing(mix_over_depth), "definition": mixing(mix_over_depth_reference)}, options.repeats, warmup=2
    )
    medians |= {f"mixing_{name}": seconds for name, seconds in alone.items()}
    ratios["autograd_mixing"] = alone["definition"] / alone["operator"]
    meta = {"unit": "seconds a step (decode: 16 steps)", "depth": DEPTH, "block_sublayers": BLOCK, **shares}
    report(meta, medians, ratios, options.json)


if __name__ == "__main__":
    main()

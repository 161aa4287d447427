"""One training step of the same 10M-parameter Llama shape: our decoder and trainer step against transformers' Llama.

Both run fp32 with torch's fused AdamW (ours with our own grouping), on the same tokens, interleaved. transformers
needs the extra `hf`.
"""

from __future__ import annotations

import torch

from _measure import arguments, interleave, matmul_peak, report
from triscale.config import from_dict, require
from triscale.models import count_parameters
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.optim.adamw import AdamW

VOCABULARY, WIDTH, DEPTH, HEADS, KV_HEADS, HIDDEN = 8192, 320, 6, 5, 5, 864
ROWS, LENGTH = 4, 512


def ours(tokens: torch.Tensor):
    config = from_dict(
        Decoder.Config,
        {
            "width": WIDTH, "depth": DEPTH, "vocabulary": VOCABULARY, "tied_head": True,
            "mixer": {"kind": "grouped_query_attention", "heads": HEADS, "kv_heads": KV_HEADS},
            "feed_forward": {"kind": "swiglu", "hidden": HIDDEN},
        },
    )  # fmt: skip
    model = config.build(seed=0).train()
    optimizer = AdamW(model, lr=1e-4)
    targets = tokens.roll(-1, 1)
    weights = torch.ones(tokens.shape)
    weights[:, -1] = 0

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(TokenBatch.from_rows(tokens, None, targets, weights)) / float(weights.sum())
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return model, step


def theirs(tokens: torch.Tensor):
    transformers = require("transformers", "hf", "the Llama peer of this benchmark")
    config = transformers.LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=WIDTH, intermediate_size=HIDDEN, num_hidden_layers=DEPTH,
        num_attention_heads=HEADS, num_key_value_heads=KV_HEADS, tie_word_embeddings=True, use_cache=False,
        attn_implementation="sdpa",
    )  # fmt: skip
    model = transformers.LlamaForCausalLM(config).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, betas=(0.9, 0.95), weight_decay=0.1, fused=True)

    def step() -> float:
        optimizer.zero_grad(set_to_none=True)
        loss = model(input_ids=tokens, labels=tokens).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        return float(loss.detach())

    return model, step


def main() -> None:
    options = arguments(__doc__ or "", repeats=9)
    tokens = torch.randint(0, VOCABULARY, (ROWS, LENGTH), generator=torch.Generator().manual_seed(0))
    model, our_step = ours(tokens)
    peer, their_step = theirs(tokens)
    medians = interleave({"triscale": our_step, "transformers_llama": their_step}, options.repeats, warmup=2)
    count = ROWS * LENGTH
    flops = 3 * model.flops_per_token(LENGTH) * count
    peak = matmul_peak(torch.float32)
    meta = {
        "parameters": count_parameters(model)["total"],
        "peer_parameters": sum(p.numel() for p in peer.parameters()),
        "tokens_per_s": count / medians["triscale"],
        "model_flops_utilisation": flops / medians["triscale"] / peak,
        "matmul_peak_gflops": peak / 1e9,
        "unit": "seconds a step",
    }
    ratios = {"transformers_llama": medians["transformers_llama"] / medians["triscale"]}
    report(meta, medians, ratios, options.json)


if __name__ == "__main__":
    main()

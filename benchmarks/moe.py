"""Forward and backward of a mixture of experts: 64 experts, top-6, width 512, expert width 256, 4,096 tokens, fp32.

Against the DeepSeek-V3 block of transformers (extra `hf`) in each of its expert implementations, and against one dense
product of the same FLOPs (the rate nothing routed can exceed). All hold the same weights and see the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from _measure import arguments, interleave, report
from triscale.config import require
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.initialize import initialize
from triscale.nn.mixture_of_experts import MixtureOfExperts

EXPERTS, TOP_K, WIDTH, HIDDEN, TOKENS, SHARED = 64, 6, 512, 256, 4096, 1
PEER_MODES = ("eager", "grouped_mm")


def step_of(function: Callable[[torch.Tensor], torch.Tensor], parameters: list, upstream: torch.Tensor) -> Callable:
    x = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(1)).requires_grad_()
    return lambda: torch.autograd.grad(function(x), [x, *parameters], upstream)


def ours() -> tuple[MixtureOfExperts, Callable]:
    config = MixtureOfExperts.Config(experts=EXPERTS, top_k=TOP_K, hidden=HIDDEN, shared=SHARED, routed_scaling=2.446)
    module = initialize(config.build(BuildContext(width=WIDTH))).train()
    batch = TokenBatch.from_lengths(torch.zeros(TOKENS, dtype=torch.int64), [TOKENS])
    return module, lambda x: module(x, batch)


def theirs(mode: str, weights: dict[str, torch.Tensor]):
    require("transformers", "hf", "the DeepSeek-V3 peer of this benchmark")
    from transformers.models.deepseek_v3.configuration_deepseek_v3 import DeepseekV3Config
    from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

    config = DeepseekV3Config(
        hidden_size=WIDTH, moe_intermediate_size=HIDDEN, n_routed_experts=EXPERTS, num_experts_per_tok=TOP_K,
        n_shared_experts=SHARED, n_group=1, topk_group=1, norm_topk_prob=True, routed_scaling_factor=2.446,
    )  # fmt: skip
    config._experts_implementation = mode
    module = DeepseekV3MoE(config).train()
    module.load_state_dict(weights)
    return module


def main() -> None:
    options = arguments(__doc__ or "", repeats=7)
    upstream = torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(2))
    module, function = ours()
    candidates = {"triscale": step_of(function, list(module.parameters()), upstream)}
    expected, skipped = candidates["triscale"](), {}
    for mode in PEER_MODES:
        peer = theirs(mode, module.state_dict())
        run = step_of(peer, list(peer.parameters()), upstream)
        try:
            got = run()
        except RuntimeError as error:
            skipped[mode] = str(error).splitlines()[0]
            continue
        torch.testing.assert_close(got[0], expected[0], rtol=1e-3, atol=1e-4)  # the same block, or no comparison
        candidates[f"transformers_{mode}"] = run
    columns = module.flops_per_token() // (2 * WIDTH)  # one product [tokens, width] x [width, columns] of equal FLOPs
    dense = torch.randn(columns, WIDTH, requires_grad=True)
    candidates["dense"] = step_of(lambda x: x @ dense.mT, [dense], torch.randn(1, TOKENS, columns))
    medians = interleave(candidates, options.repeats, warmup=2)
    peers = {name: t for name, t in medians.items() if name.startswith("transformers")}
    flops = 3 * module.flops_per_token() * TOKENS
    meta = {
        "unit": "seconds, forward and backward", "experts": EXPERTS, "top_k": TOP_K, "width": WIDTH,
        "expert_width": HIDDEN, "shared": SHARED, "tokens": TOKENS, "gflops_per_s": flops / medians["triscale"] / 1e9,
        **{f"skipped_transformers_{mode}": reason for mode, reason in skipped.items()},
    }  # fmt: skip
    ratios = {"dense": medians["dense"] / medians["triscale"]}
    if peers:
        ratios["transformers_moe"] = min(peers.values()) / medians["triscale"]
        meta["fastest_peer"] = min(peers, key=lambda name: peers[name])
    report(meta, medians, ratios, options.json)


if __name__ == "__main__":
    main()

"""Per-head Muon on the attention layers of Kimi models: which projections are cut, and that a cut is a separate matrix."""

import copy

import pytest
import torch
from torch import nn

from triscale.nn.context import BuildContext
from triscale.nn.delta_attention import KimiDeltaAttention
from triscale.nn.latent_attention import LatentAttention
from triscale.optim import MuonClip

DELTA = {"heads": 2, "value_heads": 4, "head_dim": 8, "value_head_dim": 6, "gate_rank": 5}
LATENT = {"heads": 3, "kv_lora_rank": 10, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4, "v_head_dim": 6}
# a mixer and the row counts its projections are cut into
CASES = {
    "delta, low-rank gate": (
        KimiDeltaAttention.Config(**DELTA),
        {"q_proj": (8, 8), "k_proj": (8, 8), "v_proj": (6,) * 4, "f_b_proj": (8,) * 4, "g_b_proj": (6,) * 4},
    ),
    "delta, full-rank gate": (
        KimiDeltaAttention.Config(**DELTA, output_gate="full_rank"),
        {"q_proj": (8, 8), "k_proj": (8, 8), "v_proj": (6,) * 4, "f_b_proj": (8,) * 4, "g_proj": (6,) * 4},
    ),
    "delta, one decay a head": (
        KimiDeltaAttention.Config(**DELTA, decay="head"),
        {"q_proj": (8, 8), "k_proj": (8, 8), "v_proj": (6,) * 4, "g_b_proj": (6,) * 4},
    ),
    "latent, gated": (
        LatentAttention.Config(**LATENT, output_gate=True),
        {"q_proj": (12,) * 3, "kv_b_proj": (8, 6) * 3, "g_proj": (6,) * 3},
    ),
    "latent, low-rank query": (
        LatentAttention.Config(**LATENT, q_lora_rank=7),
        {"q_b_proj": (12,) * 3, "kv_b_proj": (8, 6) * 3},
    ),
}


def mixer(config):
    torch.manual_seed(0)
    module = config.build(BuildContext(width=16, layer=0, depth=1))
    for parameter in module.parameters():
        nn.init.normal_(parameter, std=0.1)
        parameter.grad = torch.randn_like(parameter)
    return module


@pytest.mark.parametrize("name", CASES)
def test_describe_shows_the_blocks(name):
    config, blocks = CASES[name]
    optimizer = MuonClip(mixer(config), per_head=True)
    rules = {rule.name: rule for rule in optimizer.rules.values()}
    cut = {key.removesuffix(".weight"): rule.blocks for key, rule in rules.items() if rule.blocks}
    assert cut == blocks
    lines = {line.split()[0]: line for line in optimizer.describe().splitlines()[1:]}
    for projection, sizes in blocks.items():
        for size in set(sizes):
            assert f"{sizes.count(size)}x[{size}, " in lines[f"{projection}.weight"], projection


@pytest.mark.parametrize("per_head", [False, True])
@pytest.mark.parametrize("name", CASES)
def test_an_update_is_that_of_separate_matrices(name, per_head):
    config, blocks = CASES[name]
    module = mixer(config)
    twin = copy.deepcopy(module)
    for ours, theirs in zip(module.parameters(), twin.parameters(), strict=True):
        theirs.grad = ours.grad.clone()
    optimizer = MuonClip(module, lr=0.02, per_head=per_head, qk_clip_threshold=None)
    muon = [key for key, p in module.named_parameters() if optimizer.rules[id(p)].algorithm == "muon"]
    optimizer.step()
    for key in muon:
        parameter, moved = twin.get_parameter(key), module.get_parameter(key)
        sizes = blocks.get(key.removesuffix(".weight"), ()) if per_head or "kv_b_proj" in key else ()
        pieces = [nn.Parameter(piece.clone()) for piece in parameter.detach().split(sizes or parameter.shape[0])]
        for piece, grad in zip(pieces, parameter.grad.split(sizes or parameter.shape[0]), strict=True):
            piece.grad = grad.clone()
        MuonClip([{"params": pieces, "algorithm": "muon"}], lr=0.02, qk_clip_threshold=None).step()
        assert torch.equal(moved, torch.cat([piece.detach() for piece in pieces])), key


def test_a_hugging_face_kimi_linear_is_cut_alike_and_its_delta_layers_are_not_clipped():
    transformers = pytest.importorskip("transformers", minversion="5")
    if not hasattr(transformers, "KimiLinearConfig"):
        pytest.skip("this transformers has no Kimi Linear")
    config = transformers.KimiLinearConfig(
        vocab_size=61, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=4, kv_lora_rank=10, qk_nope_head_dim=8, qk_rope_head_dim=4, v_head_dim=6,
        linear_head_dim=8, linear_num_heads=3, layer_types=["linear_attention", "full_attention"], num_local_experts=4,
        num_experts_per_tok=2, moe_intermediate_size=16, mlp_layer_types=["dense", "dense"], pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    model = transformers.KimiLinearForCausalLM(config).train()
    optimizer = MuonClip.for_model(model, per_head=True)
    rules = {rule.name.removeprefix("model.layers."): rule for rule in optimizer.rules.values()}
    for part in ("q_proj", "k_proj", "v_proj", "g_b_proj", "forget_gate.f_b_proj"):
        assert rules[f"0.self_attn.{part}.weight"].blocks == (8, 8, 8), part
    assert rules["0.self_attn.g_a_proj.weight"].blocks == () == rules["0.self_attn.o_proj.weight"].blocks
    assert rules["0.self_attn.b_proj.weight"].algorithm == "adamw"
    assert rules["1.self_attn.kv_b_proj.weight"].blocks == (8, 6) * 4
    assert [target.name for target in optimizer.qk_clip.targets] == ["model.layers.1.self_attn"]
    assert optimizer.skipped_mixers == ["model.layers.0.self_attn"]
    tokens = torch.randint(3, 61, (2, 9), generator=torch.Generator().manual_seed(0))
    model(input_ids=tokens, labels=tokens, use_cache=False).loss.backward()
    optimizer.step()
    seen = optimizer.clip_report.max_logits
    assert list(seen) == ["model.layers.1.self_attn"] and min(seen["model.layers.1.self_attn"]) > -torch.inf

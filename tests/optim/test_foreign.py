"""MuonClip on tiny random Hugging Face models: three lines, right groups, exact maxima, exact clipping."""

import copy

import pytest
import torch
from torch import nn

from triscale.config import TriScaleError
from triscale.optim import MuonClip

transformers = pytest.importorskip("transformers", minversion="5")

COMMON = {"vocab_size": 61, "hidden_size": 32, "num_hidden_layers": 2, "max_position_embeddings": 64,
          "intermediate_size": 48, "num_attention_heads": 4}  # fmt: skip


def llama(**settings):
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**COMMON, num_key_value_heads=2, **settings))


def qwen2():
    return transformers.Qwen2ForCausalLM(transformers.Qwen2Config(**COMMON, num_key_value_heads=2))


def qwen3():
    return transformers.Qwen3ForCausalLM(transformers.Qwen3Config(**COMMON, num_key_value_heads=2, head_dim=8))


def deepseek(q_lora_rank=12):
    config = transformers.DeepseekV3Config(
        **COMMON, num_key_value_heads=4, q_lora_rank=q_lora_rank, kv_lora_rank=10, qk_nope_head_dim=8,
        qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=4, num_experts_per_tok=2, n_group=1, topk_group=1,
        moe_intermediate_size=16, n_shared_experts=1, first_k_dense_replace=1,
    )  # fmt: skip
    model = transformers.DeepseekV3ForCausalLM(config)
    for name, parameter in model.named_parameters():
        if "experts" in name or "gate" in name:
            nn.init.normal_(parameter, std=0.05)
    return model


CLIPPED = {"llama": llama, "qwen2": qwen2, "deepseek": deepseek, "moonlight": lambda: deepseek(None)}


def made(name):
    torch.manual_seed(0)
    model = CLIPPED[name]().train()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            if "q_proj" in key or "k_proj" in key or "q_b_proj" in key or "kv_b_proj" in key:
                parameter.copy_(torch.randn_like(parameter) * 0.5)
    return model


def tokens():
    return torch.randint(1, 61, (2, 12), generator=torch.Generator().manual_seed(1))


def logits_by_eager(model, ids, mask=None):
    """Reference: the largest pre-softmax logit of each head, from eager attention's own matrices (log of weights)."""
    seen = {}
    twin = copy.deepcopy(model).eval()
    twin.set_attn_implementation("eager")
    originals = torch.nn.functional.softmax
    layers = iter(range(100))

    def spy(scores, *args, **kwargs):
        if scores.ndim == 4:
            seen[next(layers)] = scores.detach().float().amax((0, 2, 3))
        return originals(scores, *args, **kwargs)

    torch.nn.functional.softmax = spy
    try:
        with torch.no_grad():
            twin(input_ids=ids, attention_mask=mask, use_cache=False)
    finally:
        torch.nn.functional.softmax = originals
    return list(seen.values())


@pytest.mark.parametrize("name", CLIPPED)
@pytest.mark.parametrize("padded", [False, True])
def test_recorded_maxima_are_those_of_the_logits(name, padded):
    model, ids = made(name), tokens()
    optimizer = MuonClip.for_model(model, lr=0.0, qk_clip_threshold=1e9)
    mask = torch.ones_like(ids)
    if padded:
        mask[0, 8:] = 0
    model(input_ids=ids, attention_mask=mask if padded else None, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    expected = logits_by_eager(model, ids, mask if padded else None)
    for got, want in zip(optimizer.clip_report.max_logits.values(), expected, strict=True):
        assert torch.allclose(torch.tensor(got), want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", CLIPPED)
def test_heads_over_the_threshold_shrink_by_gamma(name):
    """Layer 0 only: later layers see inputs changed by the clip of earlier ones."""
    model, ids = made(name), tokens()
    before = logits_by_eager(model, ids)[0]
    threshold = before.sort().values[1:3].mean().item()
    optimizer = MuonClip.for_model(model, lr=0.0, qk_clip_threshold=threshold)
    model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    optimizer.step()
    after = logits_by_eager(model, ids)[0]
    assert torch.allclose(after, before.clamp(max=threshold), rtol=1e-3)


def test_normalised_queries_are_skipped_and_listed():
    model = qwen3().train()
    optimizer = MuonClip.for_model(model)
    assert optimizer.qk_clip.targets == [] and len(optimizer.skipped_mixers) == 2
    assert "QK-norm): model.layers.0.self_attn" in optimizer.describe()


@pytest.mark.parametrize("make", [llama, qwen2, qwen3, deepseek])
def test_every_parameter_has_its_rule(make):
    model = make()
    optimizer = MuonClip.for_model(model)
    rules = {rule.name: rule for rule in optimizer.rules.values()}
    assert sorted(rules) == sorted(name for name, _ in model.named_parameters())
    for name, rule in rules.items():
        muon = ("_proj" in name and not name.endswith("bias")) or name.endswith("mlp.gate.weight")
        assert (rule.algorithm == "muon") == muon, name
        if name.endswith("experts.gate_up_proj"):
            assert rule.shapes(model.get_parameter(name).shape) == [(4, 16, 32), (4, 16, 32)]


def test_per_head_cuts_latent_keys_and_values_apart():
    model = deepseek()
    optimizer = MuonClip.for_model(model, per_head=True)
    rules = {rule.name: rule for rule in optimizer.rules.values()}
    assert rules["model.layers.0.self_attn.kv_b_proj.weight"].blocks == (8, 6) * 4
    assert rules["model.layers.0.self_attn.q_b_proj.weight"].blocks == (12,) * 4


@pytest.mark.parametrize("name", CLIPPED)
def test_training_lowers_the_loss_and_saves_as_before(name, tmp_path):
    model, ids = made(name), tokens()
    optimizer = MuonClip.for_model(model, lr=3e-3)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = model(input_ids=ids, labels=ids, use_cache=False).loss
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0] * 0.8
    model.save_pretrained(tmp_path)
    again = type(model).from_pretrained(tmp_path).eval()
    with torch.no_grad():
        assert torch.allclose(again(ids).logits, model.eval()(ids).logits, atol=1e-5)


def test_unknown_models_are_refused_with_a_way_out():
    with pytest.raises(TriScaleError, match="qk_clip_threshold=None"):
        MuonClip.for_model(nn.Linear(3, 3))

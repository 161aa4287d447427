"""What we write, transformers reads, and the other way: equal logits over random dimensions."""

from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file

from triscale.config import ConfigError, TriScaleError, from_dict
from triscale.models import from_published, to_published
from triscale.models.decoder import Decoder

VOCABULARY = 96
SIZES = {"max_examples": 12, "derandomize": True, "deadline": None}
width = st.sampled_from([24, 40, 48])
heads = st.integers(1, 4)
tied = st.booleans()


def even(low, high):
    return st.integers(low // 2, high // 2).map(lambda n: 2 * n)


@st.composite
def feed_forwards(draw):
    """Dense throughout, or some dense layers and a mixture of experts (rows of 16 bytes, as transformers wants)."""
    if draw(st.booleans()):
        return {"feed_forward": {"kind": "swiglu", "hidden": draw(st.integers(8, 40))}}
    groups = draw(st.sampled_from([1, 2]))
    experts = groups * draw(st.integers(2, 4))
    return {
        "first_dense": draw(st.integers(0, 2)),
        "dense_feed_forward": {"kind": "swiglu", "hidden": draw(st.integers(8, 40))},
        "feed_forward": {
            "kind": "mixture_of_experts", "experts": experts, "top_k": draw(st.integers(1, experts // groups)),
            "hidden": 4 * draw(st.integers(1, 6)), "shared": draw(st.integers(1, 2)), "groups": groups,
            "top_groups": draw(st.integers(1, groups)), "renormalize": draw(st.booleans()), "routed_scaling": 1.7,
            "balance": {"kind": "none"},
        },
    }  # fmt: skip


@st.composite
def latents(draw, rotary):
    yarn = st.none() | st.just({"factor": 8.0, "original_context": 32}) if rotary else st.none()
    config = {
        "kind": "latent_attention", "heads": draw(heads), "q_lora_rank": draw(st.none() | st.integers(4, 24)),
        "kv_lora_rank": draw(st.integers(4, 24)), "qk_nope_head_dim": draw(st.integers(4, 20)),
        "qk_rope_head_dim": draw(even(4, 12)), "v_head_dim": draw(st.integers(4, 20)),
        "rope_theta": draw(st.sampled_from([1e4, 5e4])) if rotary else 0.0, "yarn": draw(yarn),
    }  # fmt: skip
    return {key: value for key, value in config.items() if value is not None}


@st.composite
def llamas(draw):
    kv = draw(st.integers(1, 2))  # the heads must divide every width drawn
    mixer = {"kind": "grouped_query_attention", "heads": kv * draw(st.integers(1, 2)), "kv_heads": kv,
             "head_dim": draw(even(4, 16)), "rope_theta": draw(st.sampled_from([1e4, 5e5]))}  # fmt: skip
    return {"mixer": mixer, "feed_forward": {"kind": "swiglu", "hidden": draw(st.integers(8, 40))}}


@st.composite
def deepseeks(draw):
    return {"mixer": draw(latents(True)), **draw(feed_forwards())}


@st.composite
def kimi_linears(draw):
    delta = {"kind": "delta_attention", "heads": draw(heads), "head_dim": draw(even(4, 20)), "convolution": 4}
    pattern = draw(st.sampled_from([{"pattern": "3:1"}, {"pattern": "1:1"}, {"full_layers": [0, 2]}]))
    # transformers' class has full-rank queries in this family
    full = draw(latents(False)) | {"q_lora_rank": None}
    full.pop("q_lora_rank")
    return {"mixer": {"kind": "hybrid", "linear": delta, "full": full, **pattern}, **draw(feed_forwards())}


def random_model(tree, seed):
    """Every tensor random, norms and router biases too."""
    model = from_dict(Decoder.Config, {"vocabulary": VOCABULARY, **tree}).build(seed=seed)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in model.state_dict().values():
            tensor.add_(torch.randn(tensor.shape, generator=generator) * 0.1)
    return model.eval()


def agree(tree, family, folder, seed):
    transformers = pytest.importorskip("transformers")
    model = random_model(tree, seed)
    to_published(model, folder / "ours", family)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        folder / "ours", dtype=torch.float32, attn_implementation="eager"
    ).eval()
    ids = torch.randint(0, VOCABULARY, (2, 37), generator=torch.Generator().manual_seed(seed))
    with torch.no_grad():
        expected, logits = theirs(ids).logits, model(ids)
        assert float((logits - expected).abs().max()) < 1e-4
        theirs.save_pretrained(folder / "theirs")
        back = from_published(folder / "theirs")
        assert float((back(ids) - logits).abs().max()) < 1e-6
    assert back.config.mixer == from_published(folder / "ours").config.mixer
    ours, again = model.state_dict(), back.state_dict()
    assert all(torch.equal(ours[name], again[name]) for name in ours)


@pytest.mark.parametrize(
    ("family", "trees"), [("llama", llamas()), ("deepseek_v3", deepseeks()), ("kimi_linear", kimi_linears())]
)
def test_random_dimensions_agree_both_ways(family, trees, tmp_path_factory):
    @settings(**SIZES)
    @given(trees, width, tied, st.integers(0, 1000))
    def check(tree, width, tied, seed):
        tree = {"width": width, "depth": 3, "tied_head": tied, **tree}
        agree(tree, family, tmp_path_factory.mktemp(family), seed)

    check()


def test_the_baseline_as_trained_is_a_llama(tmp_path):
    """The default config, all its dimensions left out, loads in transformers without a word about formats."""
    agree({"width": 48, "depth": 2}, None, tmp_path, 0)
    assert '"model_type": "llama"' in (tmp_path / "ours" / "config.json").read_text()


def test_depth_attention_exports_under_k3_names_only(tmp_path):
    bounded = {"kind": "delta_attention", "heads": 2, "gate": "bounded", "output_gate": "full_rank"}
    tree = {
        "width": 32, "depth": 4, "residual": {"kind": "block_attention", "block": 4},
        "mixer": {"kind": "hybrid", "linear": bounded, "full": {"kind": "latent_attention", "heads": 2}},
        "feed_forward": {"kind": "situ_glu", "hidden": 24},
    }  # fmt: skip
    model = random_model(tree, 3)
    with pytest.raises(ConfigError, match=r"model\.residual.*kimi_linear.*Use the kimi_k3"):
        to_published(model, tmp_path / "no", "kimi_linear")
    assert not (tmp_path / "no").exists()
    to_published(model, tmp_path / "k3")
    names = load_file(tmp_path / "k3" / "model.safetensors").keys()
    assert "language_model.model.layers.0.self_attention_res_proj.weight" in names
    ids = torch.arange(20).view(1, 20)
    with torch.no_grad():
        assert torch.equal(from_published(tmp_path / "k3")(ids), model(ids))


@pytest.mark.parametrize(
    "change",
    [
        {"residual": {"kind": "attention"}},
        {"mixer": {"kind": "grouped_query_attention", "qk_norm": True}},
        {"mixer": {"kind": "hybrid", "linear": {"kind": "delta_attention", "decay": "head"}}},
        {"residual": {"kind": "block_attention", "block": 3}},
        {"mixer": {"kind": "grouped_query_attention", "heads": 3, "head_dim": 8}},
    ],
)
def test_what_no_format_holds_is_said_by_each(change, tmp_path):
    model = random_model({"width": 32, "depth": 2, **change}, 0)
    with pytest.raises(TriScaleError, match=r"(?s)no published format.*llama: model\..*kimi_k3: model\."):
        to_published(model, Path(tmp_path / "x"))
    assert not (tmp_path / "x").exists()


def test_a_prediction_layer_is_left_out(tmp_path):
    model = random_model({"width": 32, "depth": 2, "multi_token": {"weight": 0.3}}, 0)
    to_published(model, tmp_path)
    ids = torch.arange(20).view(1, 20)
    with torch.no_grad():
        assert torch.equal(from_published(tmp_path)(ids), model(ids))

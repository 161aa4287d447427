"""Model sizes: the published counts to the last digit, the released tensor index, and the ladder's dial."""

import json
import re
from collections import Counter, defaultdict
from functools import cache

import pytest
import torch
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from published_cases import PARITY

from triscale.cli.main import cli
from triscale.config import ConfigError, from_dict, to_dict
from triscale.models.decoder import Decoder
from triscale.models.describe import describe
from triscale.models.presets import find_preset, presets, released_names, sized

PUBLISHED = [name for name, preset in presets().items() if preset.family]
# total with embedding and head; active with the head, and without both (rounded as published)
COUNTS = {
    "moonlight-16b-a3b": (15_960_110_208, "15.289", "2.579", "2.244"),
    "kimi-linear-48b-a3b": (49_122_681_728, "48.368", "3.107", "2.729"),
    "kimi-k2": (1_026_408_232_448, "1024.059", "31.687", "30.513"),
    "kimi-k2.5": (1_026_408_232_448, "1024.059", "31.687", "30.513"),
    "kimi-k3": (2_779_484_478_208, "2777.136", "104.190", "103.015"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_counts_are_the_published_ones(name):
    result = CliRunner().invoke(cli, ["models", "show", name, "--json"])
    assert result.exit_code == 0, result.output
    figures = json.loads(result.output)
    parameters, (total, without, active_head, active_bare) = figures["parameters"], COUNTS[name]
    assert parameters["total"] == total == sum(parameters["by_component"].values())
    billions = lambda key: f"{parameters[key] / 1e9:.3f}"
    assert billions("without_both") == without
    assert billions("active_without_embedding") == active_head
    assert billions("active_without_both") == active_bare
    assert parameters["active"] - parameters["embedding"] - parameters["head"] == parameters["active_without_both"]
    assert figures["layers"] == presets()[name].config.depth


@cache
def figures_of(name):
    return describe(find_preset(name))


def test_components_are_the_published_ones():
    per_layer = lambda name, part, layers: figures_of(name)["parameters"]["by_component"][part] / layers
    assert per_layer("kimi-linear-48b-a3b", "kimi_delta_attention", 20) == 39_514_272
    assert per_layer("kimi-linear-48b-a3b", "latent_attention", 7) == 29_114_880
    assert per_layer("kimi-k2", "latent_attention", 61) == 101_124_096
    assert per_layer("kimi-k3", "kimi_delta_attention", 69) == 443_740_416
    assert per_layer("kimi-k3", "latent_attention", 24) == 232_196_096
    assert per_layer("kimi-k3", "depth_attention", 1) == 2_680_832


def test_vision_parts_are_the_published_ones():
    k25, k3 = (figures_of(name)["vision"] for name in ("kimi-k2.5", "kimi-k3"))
    assert (k25["vision_tower"], k25["projector"]) == (416_866_032, 54_277_888)
    assert (k3["vision_tower"], k3["projector"]) == (401_214_464, 46_144_512)
    assert f"{k25['total_with_text'] / 1e9:.2f}" == "1026.88" and f"{k3['total_with_text'] / 1e9:.2f}" == "2779.93"


def test_cache_is_what_the_layers_hold():
    cached = lambda name: figures_of(name)["cache"]
    assert cached("kimi-k2") == {"bytes_per_token": 61 * 576 * 2, "bytes_fixed": 0}
    states, history = 20 * 32 * 128 * 128 * 4, 20 * 3 * 3 * 4096 * 2
    assert cached("kimi-linear-48b-a3b") == {"bytes_per_token": 7 * 576 * 2, "bytes_fixed": states + history}


def test_rounded_figures_that_follow_another_rule_are_explained():
    output = CliRunner().invoke(cli, ["models", "show", "kimi-k2"]).output
    for piece in ("1.04T / 32.6B", "1,026,408,232,448", "multi-token prediction", "32.86B"):
        assert piece in output


def ranges(numbers: set[int]) -> list:
    """{0, 1, 2, 4} -> ["0-2", 4]."""
    result, run = [], []
    for number in sorted(numbers):
        if run and number != run[-1] + 1:
            result, run = [*result, run], []
        run.append(number)
    return [r[0] if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in [*result, run] if r]


def test_released_index_of_k3_name_by_name():
    """All 60 name patterns of the release with their counts, layers and experts."""
    index = json.loads((PARITY / "checkpoint_index" / "kimi_k3_index.json").read_text())
    counts, layers, experts = Counter(), defaultdict(set), defaultdict(set)
    number = re.compile(r"(layers|blocks|experts)\.(\d+)")
    for name in released_names(find_preset("kimi-k3")):
        found = number.findall(name)
        pattern = number.sub(lambda m: f"{m[1]}.{{E}}" if m[1] == "experts" else f"{m[1]}.{{L}}", name)
        counts[pattern] += 1
        for kind, place in found:
            (experts if kind == "experts" else layers)[pattern].add(int(place))
    ours = {
        pattern: {
            "count": count,
            **({"layers": ranges(layers[pattern])} if pattern in layers else {}),
            **({"experts": ranges(experts[pattern])} if pattern in experts else {}),
        }
        for pattern, count in counts.items()
    }
    assert ours == index["patterns"] and counts.total() == index["tensors"] == 497_220 and len(ours) == 60


@pytest.mark.parametrize("name", PUBLISHED)
def test_release_and_our_tree_agree(name):
    """config.json -> our config -> TOML tree -> our config -> config.json, which reads as the same model."""
    from triscale.models.published import load_family

    preset = presets()[name]
    again = from_dict(Decoder.Config, to_dict(preset.config))
    family = load_family(preset.family)
    assert again == preset.config and family.read(family.write(again)) == preset.config


@settings(max_examples=30)
@given(st.floats(5e4, 2e9))
def test_any_size_is_hit(parameters):
    config = sized(round(parameters))
    model = config.build(device="meta")
    body = sum(p.numel() for n, p in model.named_parameters() if not n.startswith(("embedding", "head")))
    assert abs(body / parameters - 1) < (0.03 if parameters > 1e6 else 0.25)
    assert config.mixer.heads == config.depth


def test_unknown_names_get_the_nearest():
    with pytest.raises(ConfigError, match="kimi-k3"):
        find_preset("kimi-k33")
    with pytest.raises(ConfigError, match="too few"):
        _ = find_preset("1k").config
    assert find_preset("12M").config.depth == 6


def test_list_and_toml():
    listed = CliRunner().invoke(cli, ["models"]).output
    assert all(name in listed for name in presets())
    shown = CliRunner().invoke(cli, ["models", "show", "kimi-linear-48b-a3b", "--toml"]).output
    import tomllib

    assert from_dict(Decoder.Config, tomllib.loads(shown)["model"]) == find_preset("kimi-linear-48b-a3b").config


def test_a_small_size_runs():
    model = find_preset("60k").config.build(seed=0)
    assert torch.isfinite(model(torch.arange(8).view(1, 8))).all()

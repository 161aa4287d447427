"""The AttnRes study: its measurements on a tiny model, and a whole run at toy size."""

import json
import math

import pytest
import torch

from triscale.config import ConfigError, from_dict
from triscale.models.decoder import Decoder
from triscale.nn.batch import TokenBatch
from triscale.studies import attnres


def model_of(residual, mixer="hybrid"):
    values = {"width": 32, "depth": 4, "vocabulary": 64, "mixer": attnres.MIXERS[mixer], "residual": residual}
    return from_dict(Decoder.Config, values)


@pytest.mark.parametrize("arm", ["none", "block", "full"])
def test_profile_has_one_number_per_sublayer_and_leaves_the_model_alone(arm):
    model = model_of(attnres.arms(2)[arm]).build().train()
    tokens = torch.randint(0, 64, (2, 12))
    batch = TokenBatch.from_rows(tokens, None, tokens.roll(-1, 1), torch.ones(2, 12))
    before = float(model(batch))
    profile = attnres.depth_profile(model, batch)
    assert all(len(values) == 8 and all(math.isfinite(v) and v > 0 for v in values) for values in profile.values())
    assert float(model(batch)) == before and all(p.grad is None for p in model.parameters())
    if arm == "full":  # blocks of one sublayer: the state is the output itself
        assert profile["states"] == pytest.approx(profile["outputs"])


def test_costs_say_that_attention_residuals_keep_no_more_for_backward():
    plain, block = (attnres.measure_memory(model_of(attnres.arms(2)[arm], "attention"), 64, 256)
                    for arm in ("none", "block"))  # fmt: skip
    assert block["parameters"] == plain["parameters"] + (2 * 4 + 1) * 2 * 32
    assert block["bytes_kept_for_backward"] <= 1.02 * plain["bytes_kept_for_backward"]
    assert block["flops_per_token"] > plain["flops_per_token"]


def test_checkpointing_lowers_what_is_kept_with_attention_residuals():
    """Recomputing layers must save memory with depth attention too, and change nothing."""
    tokens = torch.randint(0, 64, (2, 64), generator=torch.Generator().manual_seed(0))
    kept, gradients = [], []
    for recompute in (False, True):
        config = model_of({"kind": "block_attention", "block": 4}, "attention")
        model = from_dict(Decoder.Config, {**vars(config), "checkpoint_activations": recompute}).build().train()
        storages = {}

        def pack(tensor, storages=storages):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        batch = TokenBatch.from_rows(tokens, None, tokens.roll(-1, 1), torch.ones(2, 64))
        with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
            loss = model(batch)
        loss.backward()
        kept.append(sum(storages.values()))
        gradients.append([p.grad for p in model.parameters() if p.grad is not None])
    assert kept[1] < 0.7 * kept[0]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(a, b)


def test_depth_must_hold_whole_groups(tmp_path):
    with pytest.raises(ConfigError, match="multiple of 4"):
        attnres.run(tmp_path, depth=6)


@pytest.mark.slow
def test_whole_study_at_toy_size(tmp_path):
    result = attnres.run(
        tmp_path, width=32, depth=4, tokens=1024, seeds=[0], batch_tokens=512, row_length=128, eval_tokens=512,
        vocabulary=512, budgets=[1.0],
    )  # fmt: skip
    assert set(result["mixers"]) == {"attention", "hybrid"}
    assert json.loads((tmp_path / "results.json").read_text())["mixers"]["hybrid"]["arms"]["full"]["n"] == 1
    page = (tmp_path / "README.md").read_text()
    assert (tmp_path / "depth.svg").exists() and "## Verdict" in page and "--width=32" in page
    assert "Over hybrid, full: no difference detected (n = 1" in page and (tmp_path / "hybrid" / "report").is_dir()

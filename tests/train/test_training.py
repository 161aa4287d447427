"""The step itself: accumulation, divergence, evaluation."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from triscale.events import current_events
from triscale.train.checkpoint import complete_checkpoints
from triscale.train.divergence import DivergedError
from triscale.train.loop import Trainer


def losses(path):
    return [(e.data["loss"], e.data["grad_norm"]) for e in current_events(path / "events.jsonl") if e.kind == "step"]


@pytest.mark.parametrize("optimizer", [{"kind": "adamw"}, {"kind": "muonclip", "ns_dtype": "float32"}])
def test_accumulated_equals_big_batch(make_config, runtime, tmp_path, optimizer):
    runs = {}
    for micro in (64, 128, 256):
        config = make_config({"optimizer": optimizer, "train": {"micro_batch_tokens": micro}})
        Trainer(config, runtime, tmp_path / str(micro)).train()
        runs[micro] = torch.tensor(losses(tmp_path / str(micro)), dtype=torch.float64)
    for micro in (64, 128):
        torch.testing.assert_close(runs[micro], runs[256], rtol=2e-5, atol=2e-6)


def test_diverged_loss_names_step_documents_and_activation(make_config, runtime, tmp_path):
    trainer = Trainer(make_config(), replace(runtime, checkpoint_every=2), tmp_path / "run")

    def poison(event):
        if event["kind"] == "step" and event["data"]["step"] == 3:
            with torch.no_grad():
                trainer.model.layers[1].feed_forward.up_proj.weight.fill_(float("nan"))

    trainer.listeners = (poison,)
    with pytest.raises(DivergedError) as caught:
        trainer.train()
    assert caught.value.step == 3
    assert any("doc" in name for name in caught.value.documents)
    assert "layers.1.feed_forward.up_proj" in str(caught.value)
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1][0] == 2  # the broken weights of step 3 are not


def test_loss_falls_and_held_out_loss_is_reported_in_both_units(make_config, runtime, tmp_path):
    result = Trainer(make_config({"train": {"tokens": 30 * 256, "eval_every": 10}}), runtime, tmp_path / "run").train()
    assert [tokens for tokens, _ in result["curve"]] == [0, 2560, 5120, 7680]
    assert result["curve"][-1][1] < result["curve"][0][1] - 0.5
    assert 0 < result["bits_per_byte"] < 8


def test_same_seed_same_start_across_arms(make_config, runtime, tmp_path):
    """Parameters that two arms share start equal, and both read the same rows."""
    plain = Trainer(make_config(), runtime, tmp_path / "a")
    other = Trainer(make_config({"model": {"residual": {"kind": "attention"}}}), runtime, tmp_path / "b")
    first = plain.config.model.build(seed=3).state_dict()
    second = other.config.model.build(seed=3).state_dict()
    shared = first.keys() & second.keys()
    assert len(shared) == len(first)
    assert all(torch.equal(first[name], second[name]) for name in shared)


def test_activation_checkpointing_changes_nothing(make_config, runtime, tmp_path):
    for name, flag in (("off", False), ("on", True)):
        Trainer(make_config({"model": {"checkpoint_activations": flag}}), runtime, tmp_path / name).train()
    assert losses(tmp_path / "off") == losses(tmp_path / "on")

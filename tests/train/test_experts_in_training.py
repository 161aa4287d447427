"""A mixture of experts in the trainer: same result resumed, accumulated or recomputed, router bias included."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file

from triscale.events import current_events
from triscale.train.checkpoint import complete_checkpoints
from triscale.train.interrupt import Interrupted
from triscale.train.loop import Trainer

BIAS = "layers.1.feed_forward.gate.e_score_correction_bias"


def experts(**model):
    feed_forward = {"kind": "mixture_of_experts", "experts": 6, "hidden": 16, "sequence_loss": 1e-2, "latent": 16}
    return {
        "optimizer": {"kind": "muonclip"},
        "model": {"feed_forward": feed_forward, "first_dense": 1, "multi_token": {"weight": 0.3}, **model},
    }


def weights_after(config, runtime, path):
    result = Trainer(config, runtime, path).train()
    return load_file(complete_checkpoints(path / "checkpoints")[-1][1] / "model.safetensors"), result


def test_resumed_equals_straight_with_the_bias_in_fp32(make_config, runtime, tmp_path):
    config = make_config(experts())
    straight, result = weights_after(config, runtime, tmp_path / "straight")
    trainer = Trainer(config, runtime, tmp_path / "stopped")

    def interrupt(event):
        if event["kind"] == "step" and event["data"]["step"] == 3:
            trainer.guard.requested = True

    trainer.listeners = (interrupt,)
    with pytest.raises(Interrupted):
        trainer.train()
    resumed, again = weights_after(config, runtime, tmp_path / "stopped")
    assert all(torch.equal(straight[name], resumed[name]) for name in straight) and again["loss"] == result["loss"]
    assert straight[BIAS].dtype == torch.float32 and straight[BIAS].abs().max() > 0
    routers = [e for e in current_events(tmp_path / "straight" / "events.jsonl") if e.kind == "router"]
    assert len(routers) == 8 and routers[0].data["layers"].keys() >= {"layers.1.feed_forward.gate"}


@pytest.mark.parametrize("change", ["accumulation", "recomputation"])
def test_accumulation_and_recomputation_change_nothing(make_config, runtime, tmp_path, change):
    plain, _ = weights_after(make_config(experts()), runtime, tmp_path / "plain")
    other = make_config(
        {**experts(), "train": {"micro_batch_tokens": 256}}
        if change == "accumulation"
        else experts(checkpoint_activations=True)
    )
    changed, _ = weights_after(other, runtime, tmp_path / "changed")
    for name in plain:
        torch.testing.assert_close(plain[name], changed[name], rtol=2e-3, atol=2e-4, msg=lambda m, n=name: f"{n}: {m}")

"""A user's feed-forward layer, residual connection and optimizer join by import path and train like ours."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import nn

from triscale.config import ConfigError, Role, to_dict
from triscale.train.checkpoint import complete_checkpoints
from triscale.train.interrupt import Interrupted
from triscale.train.loop import Trainer


class SquaredReLU(nn.Module):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        hidden: int = 48

        def build(self, context):
            return SquaredReLU(context.width, self.hidden, context)

    def __init__(self, width, hidden, context):
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False, **context.factory)
        self.down = nn.Linear(hidden, width, bias=False, **context.factory)

    def forward(self, x, batch=None):
        return self.down(torch.relu(self.up(x)) ** 2)

    def parameter_roles(self):
        return {"up.weight": Role(kind="matrix"), "down.weight": Role(kind="matrix")}

    def flops_per_token(self):
        return 4 * self.up.weight.numel()


class ScaledResidual(nn.Module):
    """``x + f(norm(x)) / 2``."""

    @dataclass(frozen=True, kw_only=True)
    class Config:
        scale: float = 0.5

        def build_start(self):
            return lambda embedding: embedding

        def build(self, context, sublayer):
            return ScaledResidual(self.scale)

        def build_output(self, context):
            return ScaledResidual(self.scale)

    def __init__(self, scale):
        super().__init__()
        self.scale = scale

    def read(self, state, norm=None):
        return state if norm is None else norm(state)

    def write(self, state, output):
        return state + self.scale * output

    def flops_per_token(self):
        return 0


class Descent(torch.optim.SGD):
    @dataclass(frozen=True, kw_only=True)
    class Config:
        lr: float = 0.1
        momentum: float = 0.9

        def build(self, model):
            return Descent(model.parameters(), lr=self.lr, momentum=self.momentum)


class WithoutConfig:
    pass


OWN = {
    "model": {
        "feed_forward": {"kind": f"{__name__}:SquaredReLU", "hidden": 40},
        "residual": {"kind": f"{__name__}:ScaledResidual"},
    },
    "optimizer": {"kind": f"{__name__}:Descent", "lr": 0.3},
}


def test_own_parts_train_print_themselves_and_resume(make_config, runtime, tmp_path):
    config = make_config(OWN)
    assert to_dict(config)["model"]["feed_forward"] == {"kind": f"{__name__}:SquaredReLU", "hidden": 40}
    straight = Trainer(config, runtime, tmp_path / "a").train()
    assert straight["curve"][-1][1] < straight["curve"][0][1]
    trainer = Trainer(config, runtime, tmp_path / "b")

    def stop(event):
        if event["kind"] == "step" and event["data"]["step"] == 4:
            trainer.guard.requested = True

    trainer.listeners = (stop,)
    with pytest.raises(Interrupted):
        trainer.train()
    assert complete_checkpoints(tmp_path / "b" / "checkpoints")[-1][0] == 4
    assert Trainer(config, runtime, tmp_path / "b").train()["loss"] == straight["loss"]


def test_a_class_without_config_is_refused_with_the_fix(make_config):
    with pytest.raises(ConfigError, match="nested dataclass named Config"):
        make_config({"model": {"feed_forward": {"kind": f"{__name__}:WithoutConfig"}}})


@pytest.mark.slow
def test_compiled_run_equals_eager_closely(make_config, runtime, tmp_path):
    from dataclasses import replace

    eager = Trainer(make_config(), runtime, tmp_path / "eager").train()
    compiled = Trainer(make_config(), replace(runtime, compile=True), tmp_path / "compiled").train()
    assert compiled["loss"] == pytest.approx(eager["loss"], abs=1e-3)

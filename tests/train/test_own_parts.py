"""A user's feed-forward layer, residual connection and optimizer join by import path and train like ours."""

from __future__ import annotations

import shutil
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


def test_a_run_folder_runs_no_code_unless_it_is_trusted(make_config, runtime, tmp_path, monkeypatch):
    """Someone may have sent it: like a config file, its parts are imported only on request."""
    from click.testing import CliRunner

    from triscale.cli.main import cli
    from triscale.config import dump_toml
    from triscale.train.config import resolved
    from triscale.train.conversion import export_model
    from triscale.train.evaluation import evaluate_run
    from triscale.train.load import load_run
    from triscale.train.run_directory import RunDirectory
    from triscale.train.start import extend_run

    run, sent = tmp_path / "run", tmp_path / "sent"
    config = make_config(OWN)
    Trainer(config, runtime, run).train()
    assert load_run(run, "cpu", trust_imports=True).step == 8
    assert evaluate_run(run, device="cpu", trust_imports=True)["step"] == 8
    shutil.copytree(run, sent)
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "hostile.py").write_text("raise SystemExit('code of a run folder ran')")
    text = dump_toml(resolved(config)).replace(f"{__name__}:SquaredReLU", "hostile:Part")
    (sent / "config.toml").write_text(text)
    for read in (load_run, evaluate_run, lambda path: export_model(path, tmp_path / "out")):
        with pytest.raises(ConfigError, match=r"hostile:Part.*--trust-imports"):
            read(sent)
    with pytest.raises(ConfigError, match=r"changes more than train\.tokens"):
        extend_run(RunDirectory(sent), make_config({"train": {"tokens": 9 * 256}}))
    for arguments in (["generate", str(sent)], ["eval", str(sent)], ["config", "show", "--run", str(sent)],
                      ["convert", str(sent), str(tmp_path / "out")]):  # fmt: skip
        result = CliRunner().invoke(cli, arguments)
        assert isinstance(result.exception, ConfigError) and "--trust-imports" in str(result.exception), arguments
    shown = CliRunner().invoke(cli, ["config", "show", "--run", str(run), "--trust-imports"])
    assert "SquaredReLU" in shown.output and shown.exit_code == 0


@pytest.mark.slow
def test_compiled_run_equals_eager_closely(make_config, runtime, tmp_path):
    from dataclasses import replace

    eager = Trainer(make_config(), runtime, tmp_path / "eager").train()
    compiled = Trainer(make_config(), replace(runtime, compile=True), tmp_path / "compiled").train()
    assert compiled["loss"] == pytest.approx(eager["loss"], abs=1e-3)

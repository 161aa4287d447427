"""The logit sentinel: trend, early warning, spikes, resume."""

import io
import json
import math

import pytest
import torch
from rich.console import Console
from torch import nn

from triscale.events import current_events
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.grouped_query_attention import GroupedQueryAttention
from triscale.nn.initialize import initialize
from triscale.optim import AdamW, MuonClip
from triscale.train import progress as progress_module
from triscale.train.loop import Trainer
from triscale.train.progress import Progress
from triscale.train.telemetry import LogitSentinel


class Layer(nn.Module):
    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(2))
        self.record_max_logits = False
        self.register_buffer("max_logits", torch.full((2,), -torch.inf))


def watch(**settings):
    model = nn.ModuleDict({"layer": Layer()})
    return model.layer, LogitSentinel(model, AdamW(model), every=1, **settings)


def feed(layer, sentinel, step, values):
    sentinel.arm(step)
    layer.max_logits.copy_(torch.tensor(values))
    return sentinel.observe(step)


def test_slope_and_warning_before_the_limit():
    layer, sentinel = watch(limit=1000.0, horizon=100)
    warned_at = None
    for step in range(200):
        feed(layer, sentinel, step, [10.0, 5.0 * step])
        if warned_at is None and sentinel.warnings():
            warned_at = step
    assert sentinel.slopes()["layer"] == pytest.approx([0.0, 5.0])
    assert warned_at is not None and 5.0 * warned_at < 1000 <= 5.0 * (warned_at + 101)
    assert sentinel.warnings() == [], "named once"
    assert (layer.max_logits == -torch.inf).all()


def test_quiet_logits_never_warn():
    layer, sentinel = watch()
    for step in range(100):
        feed(layer, sentinel, step, [50 + math.sin(step), float("-inf") if step < 5 else 3.0])
        assert sentinel.warnings() == []


def test_measures_every_n_steps_only():
    model = nn.ModuleDict({"layer": Layer()})
    sentinel = LogitSentinel(model, AdamW(model), every=10)
    measured = [step for step in range(40) if feed(model.layer, sentinel, step, [1.0, 1.0])]
    assert measured == [0, 10, 20, 30]


def test_a_jump_is_a_spike_and_noise_is_not():
    _, sentinel = watch()
    generator = torch.Generator().manual_seed(0)
    losses = [3.0 + 0.02 * torch.randn(1, generator=generator).item() for _ in range(200)]
    assert not any(sentinel.spike(loss) for loss in losses)
    assert sentinel.spike(6.0) and not sentinel.spike(3.0)
    assert sentinel.spikes == 1


def test_state_is_json_and_resumes():
    layer, straight = watch(horizon=100)
    other, resumed = watch(horizon=100)
    lines = {}
    for name, sentinel, module in (("straight", straight, layer), ("resumed", resumed, other)):
        lines[name] = []
        for step in range(60):
            if name == "resumed" and step == 25:
                state = json.loads(json.dumps(sentinel.state_dict()))
                module, sentinel = watch(horizon=100)
                sentinel.load_state_dict(state)
            feed(module, sentinel, step, [1.0, 17.0 * step])
            lines[name] += sentinel.warnings() + [sentinel.spike(3.0 + (step == 50)), sentinel.largest]
    assert lines["straight"] == lines["resumed"]


def test_with_clipping_the_optimizers_report_is_read():
    config = GroupedQueryAttention.Config(heads=2, head_dim=8)
    module = initialize(config.build(BuildContext(width=16, layer=0, depth=1)), 0).train()
    model = nn.ModuleDict({"attention": module})
    optimizer = MuonClip(model, lr=0.0, qk_clip_threshold=1e-4)
    sentinel = LogitSentinel(model, optimizer)
    for step in range(3):
        sentinel.arm(step)
        module(torch.randn(1, 6, 16), TokenBatch.from_lengths(torch.zeros(6, dtype=torch.long), [6])).sum().backward()
        optimizer.step()
        assert sentinel.observe(step) == optimizer.clip_report.max_logits
    assert sentinel.clipped > 0 and math.isfinite(sentinel.largest)


def lines_of(events, width=200):
    """What a reader without a terminal would see if every line were due."""
    console = Console(file=io.StringIO(), width=width)
    progress = Progress("run", console)
    for kind, data in events:
        progress.last_line = -1e9
        progress({"kind": kind, "data": data})
    return console.file.getvalue().splitlines()


STEP = {"step": 3, "loss": 2.0, "lr": 1e-3, "grad_norm": 1.0, "seconds": 3.0, "tokens_per_s": 1000.0, "mfu": 0.1}


def test_the_progress_line_shows_the_largest_logit_and_warns():
    start = ("run.start", {"steps": 10})
    logits = lambda warned, *heads: (
        "logits",
        {"step": 3, "max_logits": {"a": [1.0, heads[0]], "b": heads}, "warned": warned},
    )
    assert "max logit" not in lines_of([start, ("step", STEP)])[-1]
    line = lines_of([start, ("step", STEP), logits([], 412.25, "-inf")])[-1]
    assert "max logit 412.2 " in line and "GROWING" not in line and "step 3/10" in line
    assert "max logit 412.2 GROWING" in lines_of([start, ("step", STEP), logits(["b"], 412.25)])[-1]
    assert "max logit" not in lines_of([start, ("step", STEP), logits([], 5.0), start, ("step", STEP)])[-1]


def test_a_run_that_records_logits_says_so_in_its_progress(tmp_path, make_config, runtime, monkeypatch):
    monkeypatch.setattr(progress_module, "PLAIN_SECONDS", -1.0)
    console = Console(file=io.StringIO(), width=200)
    config = make_config({"optimizer": {"kind": "muonclip", "lr": 0.05}})
    with Progress("run", console) as progress:
        Trainer(config, runtime, tmp_path / "run", listeners=(progress,)).train()
    shown = [line for line in console.file.getvalue().splitlines() if "max logit" in line]
    largest = [e.data["max_logits"] for e in current_events(tmp_path / "run" / "events.jsonl") if e.kind == "logits"]
    assert len(largest) == config.train.steps
    assert f"max logit {max(v for heads in largest[-1].values() for v in heads):.1f}" in shown[-1]


def test_the_progress_line_counts_to_the_end_of_a_resumed_run():
    """Not to that of the run before it, which the same line has shown."""
    events = [("run.start", {"steps": 10}), ("eval", {"loss": 4.0}), ("run.resume", {"step": 2, "steps": 20})]
    shown = lines_of([*events, ("step", STEP)])[-1]
    assert "step 3/20" in shown and "held-out" not in shown

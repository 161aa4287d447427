"""QK-Clip: published goldens, exact effect on logits, and everything that must not be clipped."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import nn

from triscale.config import ClipRows, Role
from triscale.nn.batch import TokenBatch
from triscale.nn.context import BuildContext
from triscale.nn.grouped_query_attention import GroupedQueryAttention
from triscale.nn.initialize import initialize
from triscale.optim import MuonClip
from triscale.optim.qk_clip import gamma_of, row_scales, scale_rows

DATA = Path(__file__).parents[1] / "data" / "parity" / "qk_clip"
GOLDEN = load_file(DATA / "io.safetensors")
CONFIG = json.loads((DATA / "config.json").read_text())


def rows_of(case):
    """The rule of each case as clip rows: MHA splits gamma evenly, MLA as in Kimi K2."""
    heads, nope, rope, value = (
        CONFIG["heads"], CONFIG["qk_nope_head_dim"], CONFIG["qk_rope_head_dim"], CONFIG["v_head_dim"],
    )  # fmt: skip
    if case == "mha":
        d = CONFIG["mha_head_dim"]
        rows = tuple(ClipRows(h, h * d, (h + 1) * d, 0.5) for h in range(heads))
        return {"q_proj": rows, "k_proj": rows}
    q, kv = nope + rope, nope + value
    content = [ClipRows(h, h * q, h * q + nope, 0.5) for h in range(heads)]
    rotary = [ClipRows(h, h * q + nope, (h + 1) * q, 1.0) for h in range(heads)]
    return {
        "q_b_proj": tuple(content + rotary),
        "kv_b_proj": tuple(ClipRows(h, h * kv, h * kv + nope, 0.5) for h in range(heads)),
    }


@pytest.mark.parametrize("case", ["mha", "mla_rope", "mla_nope"])
def test_published_goldens(case):
    tau = GOLDEN[f"{case}.tau"].item()
    gamma = [gamma_of(value, tau) for value in GOLDEN[f"{case}.max.before"].tolist()]
    assert gamma == pytest.approx(GOLDEN[f"{case}.gamma"].tolist(), abs=1e-15)
    rules = rows_of(case)
    for name, rows in rules.items():
        weight = GOLDEN[f"{case}.{name}.before"].clone()
        scale_rows(weight, row_scales(rows, gamma, "per_query_head", name))
        assert torch.allclose(weight, GOLDEN[f"{case}.{name}.after"], rtol=0, atol=1e-11)


@pytest.mark.parametrize("value", [0.0, -5.0, float("nan"), float("inf"), float("-inf"), 99.0, 100.0])
def test_nothing_to_clip(value):
    assert gamma_of(value, 100.0) == 1.0


def attention(kv_heads, seed=0, dtype=torch.float32):
    config = GroupedQueryAttention.Config(heads=4, kv_heads=kv_heads, head_dim=8)
    module = config.build(BuildContext(width=16, layer=0, depth=1, dtype=dtype))
    initialize(module, seed)
    with torch.no_grad():
        module.q_proj.weight.mul_(20)
        module.k_proj.weight.mul_(20)
    return module.train()


def batch_and_input(tokens=12, seed=1):
    x = torch.randn(1, tokens, 16, generator=torch.Generator().manual_seed(seed))
    return TokenBatch.from_lengths(torch.zeros(tokens, dtype=torch.long), [5, tokens - 5]), x


def maxima_of(module, batch, x):
    module.max_logits.fill_(-torch.inf)
    recording, module.record_max_logits = module.record_max_logits, True
    with torch.no_grad():
        module(x, batch)
    module.record_max_logits = recording
    return module.max_logits.clone()


def step_without_moving(module, batch, x, **settings):
    """One step whose only effect can be the clip: learning rate 0."""
    optimizer = MuonClip(module, lr=0.0, **settings)
    module(x.to(module.q_proj.weight.dtype), batch).float().sum().backward()
    optimizer.step()
    return optimizer


@pytest.mark.parametrize(("kv_heads", "rule"), [(4, "per_query_head"), (2, "per_query_head"), (1, "per_query_head")])
def test_heads_over_the_threshold_shrink_by_gamma_and_others_keep_every_bit(kv_heads, rule):
    module = attention(kv_heads)
    batch, x = batch_and_input()
    before = maxima_of(module, batch, x)
    weights = {name: p.detach().clone() for name, p in module.named_parameters()}
    threshold = before.sort().values[1:3].mean().item()  # two heads above, two below
    module.max_logits.fill_(-torch.inf)
    optimizer = step_without_moving(module, batch, x, qk_clip_threshold=threshold, qk_clip_rule=rule)
    assert (module.max_logits == -torch.inf).all(), "the maxima belong to one step"
    after = maxima_of(module, batch, x)
    high = before > threshold
    assert 0 < high.sum() < 4 and optimizer.clip_report.clipped == high.sum()
    assert torch.allclose(after[high], torch.full_like(after[high], threshold), rtol=1e-4)
    assert torch.equal(after[~high], before[~high])
    assert torch.equal(module.v_proj.weight, weights["v_proj.weight"])
    if kv_heads < 4:
        assert torch.equal(module.k_proj.weight, weights["k_proj.weight"]), "shared keys stay"


def test_grouped_rule_scales_the_whole_group():
    module = attention(2)
    batch, x = batch_and_input()
    before = maxima_of(module, batch, x)
    threshold = before.max().item() / 2
    module.max_logits.fill_(-torch.inf)
    step_without_moving(module, batch, x, qk_clip_threshold=threshold, qk_clip_rule="grouped")
    after = maxima_of(module, batch, x)
    gamma = (threshold / before).clamp(max=1).view(2, 2).amin(1).repeat_interleave(2)
    assert torch.allclose(after, before * gamma, rtol=1e-4)


def test_maximum_covers_all_micro_batches():
    module = attention(4)
    batch, small = batch_and_input()
    optimizer = MuonClip(module, lr=0.0, qk_clip_threshold=1e9)
    for x in (small * 3, small):
        module(x, batch).sum().backward()
    optimizer.step()
    seen = torch.tensor(optimizer.clip_report.max_logits[""])
    assert torch.equal(seen, maxima_of(module, batch, small * 3))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf"), -3.0, 0.0])
def test_bad_maxima_leave_the_weights_alone(value):
    module = attention(4)
    optimizer = MuonClip(module, lr=0.0, qk_clip_threshold=1.0)
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    module.max_logits.fill_(value)
    optimizer.step()
    for name, parameter in module.named_parameters():
        assert torch.equal(parameter, before[name])


def test_master_and_copy_stay_consistent():
    module = attention(4, dtype=torch.bfloat16)
    batch, x = batch_and_input()
    module.q_proj.weight.data.mul_(4)
    optimizer = MuonClip(module, lr=1e-3, qk_clip_threshold=1.0)
    for _ in range(3):
        optimizer.zero_grad()
        module(x.bfloat16(), batch).float().sum().backward()
        optimizer.step()
        for parameter in module.parameters():
            assert torch.equal(optimizer.state[parameter]["master"].to(torch.bfloat16), parameter)
    assert optimizer.clip_report.clipped


class Linear(nn.Module):
    """A mixer without softmax."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(16, 16, bias=False)

    def parameter_roles(self):
        return {"proj.weight": Role(kind="matrix")}

    def cache_spec(self):
        return None


def test_layers_without_softmax_are_skipped_and_listed():
    model = nn.ModuleDict({"a": Linear(), "b": attention(4), "c": Linear()})
    optimizer = MuonClip(model)
    assert optimizer.skipped_mixers == ["a", "c"]
    assert [target.name for target in optimizer.qk_clip.targets] == ["b"]
    assert "skips (no softmax, or QK-norm): a, c" in optimizer.describe()
    optimizer.step()
    assert MuonClip(nn.ModuleDict({"a": Linear()})).qk_clip.targets == []


def test_training_is_held_at_the_threshold():
    """Pushed to grow its logits, the module exceeds the threshold without the clip and not with it."""

    def train(threshold):
        torch.manual_seed(0)
        module = attention(4)
        batch, x = batch_and_input()
        optimizer = MuonClip(module, lr=0.02, weight_decay=0.0, qk_clip_threshold=threshold)
        peak = torch.zeros(4)
        for _ in range(25):
            optimizer.zero_grad()
            q = module.q_proj(x).unflatten(-1, (4, 8))
            k = module.k_proj(x).unflatten(-1, (4, 8))
            (-(q * k).sum(-1).mean() - module(x, batch).sum() * 0).backward()
            optimizer.step()
            peak = maxima_of(module, batch, x)
            module.max_logits.fill_(-torch.inf)
        return peak.max().item()

    free = train(None)
    held = train(free / 3)
    assert held < free / 3 * 1.2

"""MuonClip as an optimizer: published trajectories, torch's optimizers as oracles, grouping, state."""

import copy
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load, load_file, save
from torch import nn

from triscale.config import ConfigError, Role, TriScaleError, from_dict, to_dict
from triscale.ops import orthogonalize
from triscale.optim import AdamW, MuonClip

GOLDEN = load_file(Path(__file__).parents[1] / "data" / "parity" / "muon_op" / "io.safetensors")
NAMES = ("tall", "wide", "square")


def muon(parameters, **settings):
    group = {"params": list(parameters), "algorithm": "muon"}
    return MuonClip([group], **{"lr": 0.02, "qk_clip_threshold": None, **settings})


@pytest.mark.parametrize(("reference", "dtype", "tolerance"), [("fp32", "float32", 5e-6), ("torch", "bfloat16", 2e-3)])
def test_published_trajectories(reference, dtype, tolerance):
    """All three matrices in one optimizer, so that equal shapes after orientation are batched."""
    parameters = [nn.Parameter(GOLDEN[f"traj.{name}.w0"].clone()) for name in NAMES]
    optimizer = muon(parameters, ns_dtype=dtype)
    for step in range(5):
        for name, parameter in zip(NAMES, parameters, strict=True):
            parameter.grad = GOLDEN[f"traj.{name}.grads"][step].clone()
        optimizer.step()
        for name, parameter in zip(NAMES, parameters, strict=True):
            assert torch.allclose(parameter, GOLDEN[f"traj.{name}.{reference}"][step], rtol=0, atol=tolerance)
    for name, parameter in zip(NAMES, parameters, strict=True):
        expected = GOLDEN[f"traj.{name}.{reference}_momentum_buffer"]
        assert torch.allclose(optimizer.state[parameter]["momentum"], expected, rtol=0, atol=5e-6)


@pytest.mark.parametrize("nesterov", [True, False])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_momentum_is_the_exact_average(dtype, nesterov):
    """The orthogonaliser normalises; it must not do so inside the buffer (any dtype, with and without Nesterov)."""
    parameter = nn.Parameter(torch.randn(6, 9).to(dtype))
    optimizer = muon([parameter], nesterov=nesterov)
    exact = torch.zeros(6, 9, dtype=torch.float64 if dtype == torch.float64 else torch.float32)
    for seed in range(4):
        parameter.grad = torch.randn(6, 9, generator=torch.Generator().manual_seed(seed)).to(dtype)
        exact.lerp_(parameter.grad.to(exact.dtype), 1 - 0.95)
        optimizer.step()
        assert optimizer.state[parameter]["momentum"].dtype == exact.dtype
        assert torch.equal(optimizer.state[parameter]["momentum"], exact)


def test_average_and_sum_form_agree():
    """The papers' M <- mu M + G gives the same updates as the average: orthogonalisation removes the constant."""
    parameter = nn.Parameter(torch.zeros(8, 12, dtype=torch.float64))
    optimizer = muon([parameter], weight_decay=0.1, lr=0.1)
    weight, total = torch.zeros(8, 12, dtype=torch.float64), torch.zeros(8, 12, dtype=torch.float64)
    for seed in range(5):
        grad = torch.randn(8, 12, dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
        total = 0.95 * total + grad
        step = 0.2 * math.sqrt(12) * orthogonalize(grad + 0.95 * total)
        weight = weight - 0.1 * (step + 0.1 * weight)
        parameter.grad = grad
        optimizer.step()
        assert torch.allclose(parameter, weight, atol=1e-5)


@pytest.mark.parametrize(("rows", "columns"), [(64, 256), (256, 64), (256, 256), (96, 1024), (1024, 96), (16, 16)])
def test_update_rms(rows, columns):
    parameter = nn.Parameter(torch.zeros(rows, columns))
    parameter.grad = torch.randn(rows, columns, generator=torch.Generator().manual_seed(1))
    muon([parameter], lr=1.0).step()
    assert 0.13 < parameter.square().mean().sqrt() < 0.21


@pytest.mark.parametrize(("scale", "factor"), [("match_rms", 0.2 * math.sqrt(12)), ("spectral", 2.0), ("none", 1.0)])
def test_update_scale_uses_the_orientation_of_the_weight(scale, factor):
    for shape in ((12, 3), (3, 12)):
        parameter = nn.Parameter(torch.zeros(shape, dtype=torch.float64))
        parameter.grad = torch.randn(shape, dtype=torch.float64)
        muon([parameter], lr=1.0, update_scale=scale).step()
        expected = 1.0 if scale == "spectral" and shape == (3, 12) else factor
        assert torch.allclose(parameter, -expected * orthogonalize(parameter.grad), atol=1e-6)


def test_decay_uses_the_base_rate():
    parameter = nn.Parameter(torch.ones(4, 6))
    parameter.grad = torch.zeros(4, 6)
    muon([parameter], lr=0.5, weight_decay=0.1).step()
    assert torch.allclose(parameter, torch.full((4, 6), 0.95))


@pytest.mark.parametrize("shape", [(5, 6, 9), (5, 33, 17), (3, 64, 48), (2, 600, 900)])
def test_expert_stack_equals_separate_matrices(shape, monkeypatch):
    """[E, m, n] and E matrices move bit for bit alike, also when a workspace limit cuts the batch."""
    monkeypatch.setattr("triscale.optim.muon_clip.WORKSPACE", 2 * shape[1] * shape[2])
    weights, grads = torch.randn(shape), torch.randn(shape)
    stack, separate = nn.Parameter(weights.clone()), [nn.Parameter(w.clone()) for w in weights]
    stack.grad = grads.clone()
    for parameter, grad in zip(separate, grads, strict=True):
        parameter.grad = grad.clone()
    for dtype in ("float32", "bfloat16"):
        muon([stack], ns_dtype=dtype).step()
        for parameter in separate:
            muon([parameter], ns_dtype=dtype).step()
        assert torch.equal(stack, torch.stack([p.detach() for p in separate]))


class Fused(nn.Module):
    """A fused projection of unequal parts, its heads, and one of each other kind of parameter."""

    def __init__(self):
        super().__init__()
        self.qkv = nn.Linear(8, 20, bias=False)
        self.experts = nn.Parameter(torch.randn(3, 10, 8))
        self.router = nn.Linear(8, 3, bias=False)
        self.norm = nn.Parameter(torch.ones(8))
        self.A_log = nn.Parameter(torch.zeros(4))
        self.conv = nn.Parameter(torch.randn(8, 1, 4))
        self.query = nn.Parameter(torch.randn(1, 8))
        self.embed = nn.Embedding(11, 8)

    def parameter_roles(self):
        return {
            "qkv.weight": Role(kind="matrix", blocks=(12, 4, 4), head_blocks=(4, 4, 4, 4, 4)),
            "experts": Role(kind="matrix", blocks=(5, 5)),
            "router.weight": Role(kind="router"),
            "norm": Role(kind="norm"),
            "A_log": Role(kind="gate", decay=False),
            "conv": Role(kind="convolution"),
            "query": Role(kind="depth_query"),
            "embed.weight": Role(kind="embedding"),
        }


def with_grads(model, seed=0):
    for index, parameter in enumerate(model.parameters()):
        generator = torch.Generator().manual_seed(seed * 100 + index)
        parameter.grad = torch.randn(parameter.shape, generator=generator).to(parameter.dtype)
    return model


@pytest.mark.parametrize(("per_head", "blocks"), [(False, (12, 4, 4)), (True, (4, 4, 4, 4, 4))])
def test_fused_projections_are_cut_into_their_matrices(per_head, blocks):
    model = with_grads(Fused())
    before = model.qkv.weight.detach().clone()
    pieces = [nn.Parameter(piece.clone()) for piece in before.split(blocks)]
    for piece, grad in zip(pieces, model.qkv.weight.grad.split(blocks), strict=True):
        piece.grad = grad.clone()
    MuonClip(model, lr=0.02, per_head=per_head).step()
    muon(pieces).step()
    assert torch.equal(model.qkv.weight, torch.cat([p.detach() for p in pieces]))


def test_describe_lists_every_parameter_once_with_its_rule():
    model = Fused()
    optimizer = MuonClip(model)
    table = optimizer.describe()
    rules = {line.split()[0]: line for line in table.splitlines()[1:] if not line.startswith("QK-Clip")}
    assert sorted(rules) == sorted(name for name, _ in model.named_parameters())
    assert {name for name, line in rules.items() if " muon " in line} == {"qkv.weight", "experts", "router.weight"}
    assert "1x[12, 8] + 2x[4, 8]" in rules["qkv.weight"] and "6x[5, 8]" in rules["experts"]
    assert [name for name, line in rules.items() if line.split()[-2] == "no"] == ["A_log"]
    grouped = [id(p) for group in optimizer.param_groups for p in group["params"]]
    assert sorted(grouped) == sorted(id(p) for p in model.parameters())


def test_gates_do_not_decay_and_norms_do():
    model = Fused()
    for parameter in model.parameters():
        parameter.grad = torch.zeros_like(parameter)
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    MuonClip(model, lr=0.5, weight_decay=0.1).step()
    for name, parameter in model.named_parameters():
        factor = 1.0 if name == "A_log" else 0.95
        assert torch.allclose(parameter, before[name] * factor), name


def test_adamw_follows_torch():
    model = nn.Sequential(nn.Linear(5, 7), nn.LayerNorm(7))
    twin = copy.deepcopy(model)
    ours = AdamW(model, lr=1e-2, weight_decay=0.1)
    theirs = torch.optim.AdamW(twin.parameters(), lr=1e-2, weight_decay=0.1, betas=(0.9, 0.95))
    for step in range(6):
        with_grads(model, step)
        with_grads(twin, step)
        ours.step()
        theirs.step()
    for a, b in zip(model.parameters(), twin.parameters(), strict=True):
        assert torch.allclose(a, b, atol=1e-6)


def test_adamw_update_rms_is_exact_for_matrices_only():
    model = with_grads(Fused())
    before = {name: p.detach().clone() for name, p in model.named_parameters()}
    AdamW(model, lr=1.0, weight_decay=0.0, update_rms=0.2).step()
    moved = {name: (p.detach() - before[name]).square().mean().sqrt() for name, p in model.named_parameters()}
    assert moved["qkv.weight"] == pytest.approx(0.2, rel=1e-4) and moved["embed.weight"] == pytest.approx(1.0, rel=1e-3)


def test_half_precision_parameters_move_by_less_than_their_resolution():
    """A bf16 weight of 1 cannot hold a step of 1e-4; its fp32 master can."""
    model = nn.Linear(4, 4, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    optimizer = MuonClip(model.named_parameters(), lr=1e-5, qk_clip_threshold=None)
    for step in range(5):
        with_grads(model, step)
        optimizer.step()
    master = optimizer.state[model.weight]["master"]
    assert (model.weight == 1).all() and not (master == 1).any()
    assert torch.equal(master.bfloat16(), model.weight)


def json_and_tensors(state):
    """Through safetensors and JSON and back: what a checkpoint does."""
    tensors = {f"{i}/{n}": v for i, s in state["state"].items() for n, v in s.items() if isinstance(v, torch.Tensor)}
    scalars = {
        str(i): {n: v for n, v in s.items() if not isinstance(v, torch.Tensor)} for i, s in state["state"].items()
    }
    text = json.loads(json.dumps({"scalars": scalars, "groups": state["param_groups"]}))
    restored: dict = {int(i): dict(s) for i, s in text["scalars"].items()}
    for key, value in load(save(tensors)).items():
        index, _, name = key.partition("/")
        restored.setdefault(int(index), {})[name] = value
    return {"state": restored, "param_groups": text["groups"]}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("make", [MuonClip, AdamW])
def test_resumed_equals_straight_bitwise(make, dtype):
    torch.manual_seed(0)
    straight = Fused().to(dtype)
    resumed = copy.deepcopy(straight)
    a = make(straight, lr=1e-2)
    for step in range(3):
        with_grads(straight, step)
        a.step()
    resumed.load_state_dict(straight.state_dict())
    b = make(resumed, lr=5.0)
    b.load_state_dict(json_and_tensors(a.state_dict()))
    for step in range(3, 6):
        for model, optimizer in ((straight, a), (resumed, b)):
            with_grads(model, step)
            optimizer.step()
    for x, y in zip(straight.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(x, y)


def test_state_of_other_parameters_is_refused():
    model, other = nn.Linear(3, 3), nn.Sequential(nn.Linear(3, 3))
    state = AdamW(model).state_dict()
    with pytest.raises(TriScaleError, match="other parameters"):
        AdamW(other).load_state_dict(state)


def test_works_with_torch_schedulers_closures_and_missing_gradients():
    model = Fused()
    optimizer = MuonClip(model, lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 0.5**step)

    def closure():
        optimizer.zero_grad()
        loss = model.qkv.weight.square().sum()
        loss.backward()
        return loss

    first = optimizer.step(closure)
    scheduler.step()
    assert optimizer.step(closure) < first
    assert {group["lr"] for group in optimizer.param_groups} == {0.05}
    assert model.experts not in optimizer.state


def test_for_unknown_parameters_names_and_modules_decide():
    model = nn.ModuleDict({
        "wte": nn.Embedding(16, 8), "conv1d": nn.Conv1d(8, 8, 4), "proj": nn.Linear(8, 8), "ln_f": nn.LayerNorm(8),
        "lm_head": nn.Linear(8, 16, bias=False), "narrow": nn.Linear(8, 1, bias=False),
    })  # fmt: skip
    for params in (model, model.named_parameters()):
        optimizer = MuonClip(params, qk_clip_threshold=None)
        chosen = [r.name for r in optimizer.rules.values() if r.algorithm == "muon"]
        assert chosen == ["proj.weight"]
        assert "(default)" in optimizer.describe()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda m: MuonClip(m.parameters(), qk_clip_threshold=None), "named_parameters"),
        (lambda m: MuonClip(m.named_parameters()), "QK-Clip"),
        (lambda m: MuonClip(m), "for_model"),
        (lambda m: MuonClip([{"params": list(m.parameters())}], qk_clip_threshold=None), "algorithm"),
        (lambda m: MuonClip([{"params": [m.bias], "algorithm": "muon"}], qk_clip_threshold=None), "matrices"),
    ],
)
def test_refusals_say_what_to_do(make, message):
    with pytest.raises(TriScaleError, match=message):
        make(nn.Linear(4, 4))


def test_wrong_blocks_are_refused():
    model = Fused()
    model.parameter_roles = lambda: {"qkv.weight": Role(kind="matrix", blocks=(12, 4))}
    with pytest.raises(ConfigError, match="sum to 16"):
        MuonClip(model)
    model.parameter_roles = lambda: {"norm": Role(kind="matrix")}
    with pytest.raises(ConfigError, match="shape"):
        MuonClip(model)


def test_configs_build_and_round_trip():
    from triscale.optim import OPTIMIZERS

    for kind, values in {"muonclip": {"per_head": True, "qk_clip_threshold": 30.0}, "adamw": {"lr": 3e-3}}.items():
        cls = OPTIMIZERS.config_class(kind, "optimizer")
        config = from_dict(cls, values)
        assert from_dict(cls, to_dict(config)) == config
        optimizer = config.build(Fused())
        assert isinstance(optimizer, torch.optim.Optimizer)
    with pytest.raises(ConfigError, match="orthogonalizer"):
        from_dict(OPTIMIZERS.config_class("muonclip", "optimizer"), {"orthogonalizer": "newton"})
    assert OPTIMIZERS.config_class("muonclip", "o")(qk_clip_threshold=0.0).build(Fused()).qk_clip is None


def test_small_gates_of_the_delta_rule_are_no_matrices():
    """By name: beta's projection, decay rates, their biases and the convolutions belong to AdamW."""
    from triscale.nn.context import BuildContext
    from triscale.nn.delta_attention import KimiDeltaAttention

    module = KimiDeltaAttention.Config(heads=2).build(BuildContext(width=32, layer=0, depth=1))
    optimizer = MuonClip(module)
    rules = {rule.name: rule for rule in optimizer.rules.values()}
    adamw = {name for name, rule in rules.items() if rule.algorithm == "adamw"}
    assert {"A_log", "dt_bias", "b_proj.weight"} <= adamw
    assert all("conv" not in name and "norm" not in name for name in rules if name not in adamw)
    assert {name for name, rule in rules.items() if not rule.decay} == {"A_log", "dt_bias"}

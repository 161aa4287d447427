"""Residual connections against the control flow of the paper, written out as one loop."""

import copy
import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from triscale.config import ConfigError, from_dict, to_dict
from triscale.nn.context import BuildContext
from triscale.nn.initialize import collect_roles, initialize
from triscale.nn.norm import RMSNorm
from triscale.nn.residual import AttentionResidual, BlockAttentionResidual, DepthState, StandardResidual, link_depth
from triscale.ops.depth_attention import mix_over_depth_reference

WIDTH, TOKENS = 12, 5


class Sublayers(nn.Module):
    """2 * depth tiny sublayers behind connections, called the way the decoder calls them."""

    def __init__(self, config, depth, random_queries=True, fused=True):
        super().__init__()
        context = BuildContext(width=WIDTH, depth=depth, dtype=torch.float64)
        self.start = config.build_start()
        self.connections = nn.ModuleList(config.build(context.at(i // 2), sublayer=i) for i in range(2 * depth))
        self.norms = nn.ModuleList(RMSNorm(WIDTH, dtype=torch.float64) for _ in range(2 * depth))
        self.maps = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False, dtype=torch.float64) for _ in range(2 * depth))
        self.output = config.build_output(context)
        self.fused = fused
        g = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for name, p in self.named_parameters():
                if "maps" in name or ("proj" in name and random_queries):
                    p.copy_(torch.randn(p.shape, generator=g, dtype=p.dtype) * 0.7)
                elif "norm" in name:
                    p.copy_(1 + 0.2 * torch.randn(p.shape, generator=g, dtype=p.dtype))

    def forward(self, x, each=None):
        state = self.start(x)
        for connection, norm, f in zip(self.connections, self.norms, self.maps, strict=True):
            h = connection.read(state, norm) if self.fused else norm(connection.read(state))
            state = connection.write(state, torch.tanh(f(h)))
            if each is not None:
                each(connection, state)
        return self.output.read(state)


def reference(model, x, block):
    """The pseudo-code of the paper: mix first, then seal; ``block`` counts sublayers."""
    mix = lambda c, sources: mix_over_depth_reference(sources, c.proj.weight, c.norm.weight, c.norm.eps)
    blocks, partial, counts = [], x, []
    for i, (connection, norm, f) in enumerate(zip(model.connections, model.norms, model.maps, strict=True)):
        h = partial if not blocks else mix(connection, [*blocks, partial])
        counts.append(len(blocks) + 1)
        if i % block == 0:
            blocks, partial = [*blocks, partial], None
        out = torch.tanh(f(norm(h)))
        partial = out if partial is None else partial + out
    return mix(model.output, [*blocks, partial]), [*counts, len(blocks) + 1]


def embedding(seed=0):
    return torch.randn(1, TOKENS, WIDTH, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


@given(depth=st.integers(1, 6), block=st.integers(1, 13))
@settings(max_examples=30, deadline=None)
def test_equals_the_papers_loop_with_gradients(depth, block):
    model = Sublayers(BlockAttentionResidual.Config(block=block), depth)
    x = embedding().requires_grad_()
    expected, counts = reference(model, x, block)
    out = model(x)
    torch.testing.assert_close(out, expected)
    assert [c.sources for c in [*model.connections, model.output]] == counts
    leaves = [x, *model.parameters()]
    weight = torch.randn_like(out)
    got = torch.autograd.grad((out * weight).sum(), leaves, allow_unused=True)
    wanted = torch.autograd.grad((expected * weight).sum(), leaves, allow_unused=True)
    for a, b in zip(got, wanted, strict=True):
        assert (a is None) == (b is None)  # only the first sublayer's query: it has a single source
        if a is not None:
            torch.testing.assert_close(a, b, rtol=1e-8, atol=1e-10)


@given(depth=st.integers(1, 7), block=st.integers(1, 9))
@settings(max_examples=30, deadline=None)
def test_two_phase_inference_equals_the_plain_form(depth, block):
    plain = Sublayers(BlockAttentionResidual.Config(block=block), depth)
    linked = Sublayers(BlockAttentionResidual.Config(block=block), depth)
    link_depth(list(linked.connections), linked.output)
    used = []
    with torch.no_grad():
        out = linked(embedding(), each=lambda _, state: used.append(state.ahead is not None))
        torch.testing.assert_close(out, plain(embedding()), rtol=1e-12, atol=1e-13)
    assert any(used) == (block > 1)


def test_block_of_one_sublayer_is_full():
    full, block = Sublayers(AttentionResidual.Config(), 4), Sublayers(BlockAttentionResidual.Config(block=1), 4)
    assert torch.equal(full(embedding()), block(embedding()))


def test_first_step_reads_the_mean_of_the_sources():
    model = Sublayers(BlockAttentionResidual.Config(block=2), 3, random_queries=False)
    states = []
    out = model(embedding(), each=lambda _, s: states.append(s))
    torch.testing.assert_close(out, torch.stack([*states[-1].blocks, states[-1].partial]).mean(0))


def test_source_counts_follow_the_published_formula():
    """floor((L - 1) / N) + 2 sources at the output for L decoder layers of N per block."""
    for layers in range(1, 13):
        for per_block in range(1, 14):
            config = BlockAttentionResidual.Config(block=2 * per_block)
            output = config.build_output(BuildContext(width=4, depth=layers))
            assert output.sources == (layers - 1) // per_block + 2
    k3 = BlockAttentionResidual.Config(block=24).build_output(BuildContext(width=4, depth=93))
    assert k3.sources == 9


def test_blocks_are_shared_references():
    model = Sublayers(BlockAttentionResidual.Config(block=2), 4)
    states: list[DepthState] = []
    x = embedding()
    model(x, each=lambda _, s: states.append(s))
    assert states[0].blocks[0] is x
    for earlier, later in itertools.pairwise(states):
        assert all(a is b for a, b in zip(earlier.blocks, later.blocks, strict=False))


@pytest.mark.parametrize("config", [StandardResidual.Config(), AttentionResidual.Config(),
                                    BlockAttentionResidual.Config(block=3)])  # fmt: skip
def test_reading_with_the_norm_equals_reading_then_norming(config):
    fused, apart = Sublayers(config, 3), Sublayers(config, 3, fused=False)
    torch.testing.assert_close(fused(embedding()), apart(embedding()))


def test_standard_is_the_plain_sum():
    model = Sublayers(StandardResidual.Config(), 2)
    h = x = embedding()
    for norm, f in zip(model.norms, model.maps, strict=True):
        h = h + torch.tanh(f(norm(h)))
    assert torch.equal(model(x), h)


def kept_elements(config, depth=6):
    """Elements of [tokens, width] tensors that a forward keeps for backward, maps' inputs and outputs excluded."""
    model = Sublayers(config, depth)
    seen: dict[int, int] = {}
    inside: list[bool] = [True]

    def pack(t):
        if inside[0] and t.shape[-1] == WIDTH and t.numel() == TOKENS * WIDTH:
            seen[t.untyped_storage().data_ptr()] = t.numel()
        return t

    keep = []  # keep every output alive so that addresses are not reused
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        state = model.start(embedding().requires_grad_())
        for connection, norm, f in zip(model.connections, model.norms, model.maps, strict=True):
            x = connection.read(state, norm)
            inside[0] = False
            out = torch.tanh(f(x))
            inside[0] = True
            state = connection.write(state, out)
            keep += [x, out, state]
        keep.append(model.output.read(state))
    return sum(seen.values())


def test_keeps_no_more_for_backward_than_the_plain_residual():
    """Every sublayer keeps one [tokens, width] tensor: the stream (plain) or the open block's sum (AttnRes)."""
    standard = kept_elements(StandardResidual.Config())
    # standard: one input per norm; attention: one partial per sublayer plus the embedding, for the output mix as well
    for config in (AttentionResidual.Config(), BlockAttentionResidual.Config(block=4)):
        assert kept_elements(config) <= standard + TOKENS * WIDTH


def test_roles_and_initial_values():
    model = Sublayers(BlockAttentionResidual.Config(block=2), 1)
    part = nn.ModuleList([model.connections, nn.ModuleList([model.output])])
    roles = collect_roles(part)
    assert {r.kind for r in roles.values()} == {"depth_query", "norm"}
    initialize(part)
    assert all((p == 0).all() for n, p in part.named_parameters() if "proj" in n)
    assert sum(p.numel() for p in part.parameters()) == (2 * 1 + 1) * 2 * WIDTH


def test_config_round_trip_and_errors():
    config = from_dict(BlockAttentionResidual.Config, {"block": 6})
    assert to_dict(config) == {"block": 6}
    with pytest.raises(ConfigError, match="block"):
        from_dict(BlockAttentionResidual.Config, {"block": 0})


@pytest.mark.parametrize("block", [1, 3])
@pytest.mark.parametrize("tokens", [1, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_two_phase_with_the_norm_for_any_dtype_and_number_of_tokens(tokens, dtype, block):
    plain, linked = (Sublayers(BlockAttentionResidual.Config(block=block), 5).to(dtype) for _ in range(2))
    link_depth(list(linked.connections), linked.output)
    x = embedding()[:, :tokens].to(dtype)
    with torch.no_grad():
        tolerance = {"rtol": 0.05, "atol": 0.05} if dtype == torch.bfloat16 else {}
        torch.testing.assert_close(linked(x), plain(x), **tolerance)


def scaled_in_place(connection):
    connection.proj.weight.add_(0.3)
    connection.norm.weight.mul_(1.1)


def replaced_parameters(connection):
    connection.norm.weight = nn.Parameter(connection.norm.weight * 1.1)
    connection.proj.weight = nn.Parameter(connection.proj.weight + 0.3)


def replaced_data(connection):  # leaves the version counter as it is
    connection.proj.weight.data = connection.proj.weight.data + 0.3
    connection.norm.weight.data = connection.norm.weight.data * 1.1


def replaced_modules(connection):
    norm = RMSNorm(WIDTH, connection.norm.eps, dtype=torch.float64)
    norm.weight.copy_(connection.norm.weight * 1.1)
    connection.norm = norm


@pytest.mark.parametrize("tokens", [1, TOKENS])
@pytest.mark.parametrize("change", [scaled_in_place, replaced_parameters, replaced_data, replaced_modules])
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_two_phase_follows_changed_weights(mode, change, tokens):
    plain, linked = (Sublayers(BlockAttentionResidual.Config(block=3), 4) for _ in range(2))
    link_depth(list(linked.connections), linked.output)
    before = None
    for _ in range(3):
        x = embedding()[:, :tokens]
        with mode():
            out = linked(x)
            torch.testing.assert_close(out, plain(x))
        assert before is None or (out - before).abs().max() > 1e-4
        before = out
        with torch.no_grad():
            for model in (plain, linked):
                for connection in (*model.connections, model.output):
                    change(connection)


@pytest.mark.parametrize("tokens", [1, TOKENS])
def test_two_phase_follows_a_training_step_a_change_of_dtype_and_a_copy(tokens):
    plain, linked = (Sublayers(BlockAttentionResidual.Config(block=3), 4) for _ in range(2))
    link_depth(list(linked.connections), linked.output)
    x = embedding()[:, :tokens]

    def agree(a, b, dtype):
        a.eval(), b.eval()
        with torch.inference_mode():
            torch.testing.assert_close(a(x.to(dtype)), b(x.to(dtype)))
        a.train(), b.train()

    agree(linked, plain, torch.float64)
    for model in (plain, linked):  # a step between two decodes
        optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
        model(x).square().sum().backward()
        optimizer.step()
    agree(linked, plain, torch.float64)
    agree(linked.float(), plain.float(), torch.float32)
    agree(linked.double(), plain.double(), torch.float64)
    twin = copy.deepcopy(linked)
    with torch.no_grad():
        for model in (plain, twin):
            for connection in model.connections:
                scaled_in_place(connection)
    agree(twin, plain, torch.float64)
    assert (twin(x) - linked(x)).abs().max() > 1e-4  # the copy folds its own weights, the original still its own


def test_one_token_survives_extreme_and_broken_values():
    """Python numbers must behave as tensors do: no overflow error, and a NaN stays a NaN."""
    model = Sublayers(BlockAttentionResidual.Config(block=3), 4).float()
    link_depth(list(model.connections), model.output)
    with torch.no_grad():
        for connection in (*model.connections, model.output):
            connection.proj.weight.mul_(1e4)
        for scale, finite in ((1e-30, True), (1.0, True), (1e15, True), (float("nan"), False), (float("inf"), False)):
            assert model(torch.full((1, 1, WIDTH), scale)).isfinite().all() == finite


def test_two_phase_stays_off_in_training():
    model, used = Sublayers(BlockAttentionResidual.Config(block=3), 4), []
    link_depth(list(model.connections), model.output)
    model(embedding(), each=lambda _, state: used.append(state.ahead)).sum().backward()
    assert used == [None] * 8

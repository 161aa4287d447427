"""Published folders become runs and come back, shard by shard; every tensor is accounted for."""

import json
import shutil
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner
from safetensors.torch import load_file, save_file

from triscale.cli.main import cli
from triscale.config import ConfigError, TriScaleError, from_dict
from triscale.models import from_published
from triscale.models.decoder import Decoder
from triscale.models.published.packed import pack_mxfp4, unpack_mxfp4
from triscale.models.published.shards import ShardReader
from triscale.models.published.vision import kimi_k3_vision
from triscale.train.conversion import export_model, import_model

PARITY = Path(__file__).parents[1] / "data" / "parity"
CASES = ["deepseek_v3_tiny", "deepseek_v3_tiny_moonlight", "kimi_linear_tiny", "kimi_k3_text_tiny"]


def run(*arguments):
    result = CliRunner().invoke(cli, list(map(str, arguments)))
    assert result.exit_code == 0, (result.output, result.exception)
    return result.output


def same_tensors(a: Path, b: Path) -> None:
    with ShardReader(a) as ours, ShardReader(b) as theirs:
        assert ours.tensors.keys() == theirs.tensors.keys()
        for name in ours.tensors:
            x, y = ours.read(name), theirs.read(name)
            assert x.dtype == y.dtype and torch.equal(x, y), name


@pytest.mark.parametrize("case", CASES)
def test_there_and_back_is_bit_exact(case, tmp_path):
    family = from_published(PARITY / case).origin.family
    output = run("convert", PARITY / case, tmp_path / "run", "--from", family, "--to", "triscale")
    assert "each used once" in output
    run("convert", tmp_path / "run", tmp_path / "back", "--shard-gb", "0.0002")
    assert len(list((tmp_path / "back").glob("model-*.safetensors"))) > 2
    same_tensors(tmp_path / "back", PARITY / case)
    assert json.loads((tmp_path / "back" / "config.json").read_text()) == json.loads(
        (PARITY / case / "config.json").read_text()
    )


def k3_release(folder: Path) -> dict[str, torch.Tensor]:
    """The K3 case the way the release stores things: bf16, packed experts, padded decay rates, a vision tower."""
    folder.mkdir()
    config = json.loads((PARITY / "kimi_k3_text_tiny" / "config.json").read_text())
    vision = json.loads((PARITY / "kimi_k3_text_tiny" / "config.json").read_text())["text_config"]["hidden_size"]
    config["vision_config"] = {
        "init_pos_emb_height": 8, "init_pos_emb_width": 8, "merge_kernel_size": [2, 2], "patch_size": 14,
        "qkv_hidden_size": 48, "text_hidden_size": vision, "vt_hidden_size": 32, "vt_intermediate_size": 80,
        "vt_num_hidden_layers": 2,
    }  # fmt: skip
    text = config["text_config"]
    text["moe_intermediate_size"], text["routed_expert_hidden_size"] = 32, 64
    tensors = {}
    for name, tensor in load_file(PARITY / "kimi_k3_text_tiny" / "model.safetensors").items():
        if name.endswith("A_log"):
            padded = torch.zeros(8)
            padded[: len(tensor)] = tensor
            tensors[name] = padded
        elif name.endswith(("dt_bias", "correction_bias", "conv1d.weight", "o_norm.weight")):
            tensors[name] = tensor
        elif ".experts." in name:
            shape = (32, 64) if not name.endswith("w2.weight") else (64, 32)
            weight = torch.randn(shape, generator=torch.Generator().manual_seed(len(tensors))) * 0.1
            tensors[f"{name}_packed"], tensors[f"{name}_scale"] = pack_mxfp4(weight)
        elif "routed_expert" in name or "shared_experts" in name:
            shape = (64,) if name.endswith("norm.weight") else (64, 64)
            tensors[name] = (torch.randn(shape, generator=torch.Generator().manual_seed(len(tensors))) * 0.1).bfloat16()
        else:
            tensors[name] = tensor.bfloat16()
    for name, shape in kimi_k3_vision(config).items():
        tensors[name] = torch.randn(shape, generator=torch.Generator().manual_seed(len(tensors))).bfloat16()
    config["dtype"] = text["dtype"] = "bfloat16"
    config["quantization_config"] = {"format": "mxfp4-pack-quantized"}
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "tokenizer_config.json").write_text('{"note": "kept"}')
    save_file(tensors, folder / "model.safetensors")
    return tensors


def test_a_release_with_packed_experts_padding_and_vision(tmp_path):
    released = k3_release(tmp_path / "k3")
    output = run("convert", tmp_path / "k3", tmp_path / "run")
    assert "96 MXFP4 weights unpacked to bf16" in output and "vision tensors checked" in output
    stored = load_file(tmp_path / "run" / "checkpoints" / "step_00000000" / "model.safetensors")
    packed = "language_model.model.layers.2.block_sparse_moe.experts.5.w3.weight"
    up = unpack_mxfp4(released[f"{packed}_packed"], released[f"{packed}_scale"])
    assert torch.equal(stored["layers.2.feed_forward.experts.gate_up_proj"][5, 32:], up)
    assert stored["layers.0.mixer.A_log"].shape == (3,) and stored["layers.0.mixer.A_log"].dtype == torch.float32
    assert stored["layers.0.mixer.q_conv1d.weight"].dtype == torch.float32
    output = run("convert", tmp_path / "run", tmp_path / "plain")
    assert "written as bf16" in output
    plain = load_file(tmp_path / "plain" / "model.safetensors")
    assert torch.equal(plain[packed], up)
    for name, tensor in released.items():  # everything that was not packed is bit-exact, padding and vision included
        if ".experts." not in name:
            assert torch.equal(plain[name], tensor) and plain[name].dtype == tensor.dtype, name
    assert (tmp_path / "plain" / "tokenizer_config.json").read_text() == '{"note": "kept"}'
    run("convert", tmp_path / "run", tmp_path / "packed", "--pack", "mxfp4")
    again = load_file(tmp_path / "packed" / "model.safetensors")
    assert again.keys() == released.keys()
    assert torch.equal(unpack_mxfp4(again[f"{packed}_packed"], again[f"{packed}_scale"]), up)
    ids = torch.arange(12).view(1, 12)
    with torch.no_grad():
        logits = [from_published(tmp_path / name)(ids) for name in ("k3", "plain", "packed")]
    assert torch.equal(logits[0], logits[1]) and torch.equal(logits[0], logits[2])


@pytest.fixture
def broken(tmp_path):
    """A copy of a case whose tensors and config may be changed: broken(change) -> folder."""

    def make(change):
        folder = tmp_path / "broken"
        shutil.copytree(PARITY / "kimi_linear_tiny", folder)
        tensors = load_file(folder / "model.safetensors")
        config = json.loads((folder / "config.json").read_text())
        change(tensors, config)
        save_file({k: v.contiguous() for k, v in tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(config))
        return folder

    return make


def drop_and_add(tensors, config):
    del tensors["model.layers.2.self_attn.k_proj.weight"]
    tensors["model.layers.2.self_attn.bonus.weight"] = torch.ones(1)


def wrong_shape(tensors, config):
    tensors["model.norm.weight"] = torch.ones(63)


def dirty_padding(tensors, config):
    for layer in (0, 1, 2, 4):
        tensors[f"model.layers.{layer}.self_attn.A_log"] = torch.ones(5)


def unknown_field(tensors, config):
    config["hidden_act"] = "relu"


def layers_twice(tensors, config):
    config["linear_attn_config"]["kda_layers"] = [1, 2, 3, 4, 5]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (drop_and_add, r"1 missing: model\.layers\.2\.self_attn\.k_proj.*1 left over: .*bonus"),
        (wrong_shape, r"model\.norm\.weight: has shape \[63\], but config\.json means \[64\]"),
        (dirty_padding, "the rest is not zero"),
        (unknown_field, r"config\.json: hidden_act: 'relu' is not supported\. Supported: 'silu'"),
        (layers_twice, "kda_layers"),
    ],
)
def test_what_does_not_fit_is_named(broken, change, message, tmp_path):
    with pytest.raises(TriScaleError, match=message):
        import_model(broken(change), tmp_path / "run")
    if change is not dirty_padding:  # values are seen only while copying
        assert not (tmp_path / "run").exists()
    with pytest.raises(TriScaleError):
        run_folder = tmp_path / "run"
        export_model(run_folder, tmp_path / "out")  # nothing that looks finished was left behind


def test_harmless_extras_are_left_out_and_named(broken, tmp_path):
    def extra(tensors, config):
        tensors["model.layers.3.self_attn.rotary_emb.inv_freq"] = torch.ones(4)
        tensors["model.layers.5.eh_proj.weight"] = torch.ones(64, 128)  # a multi-token prediction layer
        config["num_nextn_predict_layers"] = 1

    done = import_model(broken(extra), tmp_path / "run")
    (line,) = [line for line in done.lines if line.startswith("2 tensors")]
    assert "rotary_emb.inv_freq" in line and "eh_proj" in line


def test_existing_folders_are_not_overwritten(tmp_path):
    import_model(PARITY / "kimi_linear_tiny", tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a run"):
        import_model(PARITY / "kimi_linear_tiny", tmp_path / "run")
    with pytest.raises(ConfigError, match="already holds a published model"):
        export_model(tmp_path / "run", PARITY / "kimi_linear_tiny")


def test_memory_stays_near_two_shards(tmp_path):
    """A model of 24 shards is converted both ways in a fraction of its size."""
    tree = {"width": 512, "depth": 4, "vocabulary": 1024, "tied_head": False,
            "mixer": {"kind": "latent_attention", "heads": 4, "rope_theta": 10000.0},
            "feed_forward": {"kind": "mixture_of_experts", "experts": 16, "top_k": 2, "hidden": 512}}  # fmt: skip
    from triscale.models import to_published

    model = from_dict(Decoder.Config, tree).build(seed=0)
    size = sum(p.numel() * 4 for p in model.parameters())
    to_published(model, tmp_path / "published", "deepseek_v3", shard_bytes=size // 24)
    del model
    code = """
        import resource, sys
        from pathlib import Path
        from triscale.train.conversion import export_model, import_model
        from triscale.models import from_published
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        a, b, c, shard = *map(Path, sys.argv[1:4]), int(sys.argv[4])
        import_model(a, b)
        export_model(b, c, shard_bytes=shard)
        print((resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) * 1024)
    """
    arguments = [tmp_path / "published", tmp_path / "run", tmp_path / "back", size // 24]
    command = [sys.executable, "-c", textwrap.dedent(code), *map(str, arguments)]
    grown = int(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    assert grown < size / 3, (grown, size)
    same_tensors(tmp_path / "published", tmp_path / "back")


def test_a_trained_run_exports_prompts_and_continues(tmp_path):
    """train -> export as Llama -> import again -> same text; and a new run starts from the imported weights."""
    (tmp_path / "corpus").mkdir()
    for i in range(6):
        text = "\n".join(f"def f{i}_{j}(x):\n    return x + {j}\n" for j in range(60))
        (tmp_path / "corpus" / f"{i}.py").write_text(text)
    settings = [
        "--data.corpus.kind=files", f"--data.corpus.paths=[\"{tmp_path / 'corpus'}\"]", "--data.vocabulary_size=320",
        "--data.heldout_fraction=0.2", "--train.batch_tokens=256", "--train.row_length=64",
        "--train.micro_batch_tokens=256", "--train.tokens=1024", "--train.eval_tokens=128",
        f"--runtime.cache={tmp_path / 'cache'}",
    ]  # fmt: skip
    run("train", "--run", tmp_path / "run", "--model.width=32", "--model.depth=2", *settings)
    run("convert", tmp_path / "run", tmp_path / "llama", "--to", "llama")
    run("convert", tmp_path / "llama", tmp_path / "again", "--from", "llama", "--to", "triscale")
    texts = [
        run("generate", tmp_path / name, "--prompt", "def f", "--tokens", 12, "--seed", 1) for name in ("run", "again")
    ]
    assert texts[0] == texts[1]
    config = json.loads((tmp_path / "llama" / "config.json").read_text())
    assert config["bos_token_id"] == 0 and config["eos_token_id"] == 1
    output = run("train", tmp_path / "again" / "config.toml", "--run", tmp_path / "more", "--init-from",
                 tmp_path / "again", *settings, "--json")  # fmt: skip
    first = json.loads((tmp_path / "run" / "result.json").read_text())
    more = json.loads(output.strip().splitlines()[-1])
    assert abs(more["curve"][0][1] - first["loss"]) < 1e-4  # it starts where the first run ended


def k2_like():
    tree = {"width": 64, "depth": 2, "vocabulary": 96, "tied_head": False, "first_dense": 1,
            "mixer": {"kind": "latent_attention", "heads": 2, "q_lora_rank": 16, "rope_theta": 50000.0,
                      "yarn": {"factor": 64.0, "original_context": 64}},
            "feed_forward": {"kind": "mixture_of_experts", "experts": 4, "top_k": 2, "hidden": 32}}  # fmt: skip
    return from_dict(Decoder.Config, tree).build(seed=1)


def test_int4_experts_of_k25(tmp_path):
    """Packed as K2.5 releases it: prefix, codes, scales and shapes; read back to the unpacked values."""
    from triscale.models import to_published
    from triscale.models.published.packed import pack_int4, unpack_int4

    model = k2_like()
    to_published(model, tmp_path / "k25", "kimi_k25", dtype=torch.bfloat16, pack="int4")
    stored = load_file(tmp_path / "k25" / "model.safetensors")
    name = "language_model.model.layers.1.mlp.experts.3.down_proj.weight"
    assert stored[f"{name}_packed"].shape == (64, 4) and stored[f"{name}_shape"].tolist() == [64, 32]
    again = from_published(tmp_path / "k25")
    down = model.layers[1].feed_forward.experts.down_proj[3].detach()
    expected = unpack_int4(*pack_int4(down))
    assert torch.equal(again.layers[1].feed_forward.experts.down_proj[3], expected.float())
    assert again.config.mixer.yarn == model.config.mixer.yarn
    done = import_model(tmp_path / "k25", tmp_path / "run")
    assert any("12 INT4 weights unpacked" in line for line in done.lines)


def test_fp8_blocks_of_k2(tmp_path):
    from triscale.models import to_published

    model = k2_like()
    to_published(model, tmp_path, "deepseek_v3", dtype=torch.bfloat16)
    tensors = load_file(tmp_path / "model.safetensors")
    name = "model.layers.1.mlp.experts.0.up_proj.weight"
    tensors[name] = torch.full((32, 64), 2.0).to(torch.float8_e4m3fn)
    tensors[f"{name}_scale_inv"] = torch.tensor([[0.25]])
    save_file(tensors, tmp_path / "model.safetensors")
    up = from_published(tmp_path).layers[1].feed_forward.experts.gate_up_proj[0, 32:]
    assert (up == 0.5).all()


def test_interrupted_conversion_leaves_no_run_and_can_be_repeated(tmp_path):
    def stop(done, total):
        if done > total / 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        import_model(PARITY / "kimi_linear_tiny", tmp_path / "run", report=stop)
    assert not list((tmp_path / "run").rglob("*.safetensors")) and not (tmp_path / "run" / "config.toml").exists()
    import_model(PARITY / "kimi_linear_tiny", tmp_path / "run")
    export_model(tmp_path / "run", tmp_path / "back")
    same_tensors(tmp_path / "back", PARITY / "kimi_linear_tiny")

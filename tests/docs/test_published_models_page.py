"""The page about published models: its commands and its code run as written, on a small model of that name."""

import re
import shlex
from pathlib import Path

import torch
from click.testing import CliRunner

from triscale.cli.main import cli
from triscale.config import from_dict
from triscale.data.tokenizer import train_tokenizer
from triscale.models import from_published, to_published
from triscale.models.decoder import Decoder
from triscale.models.published import FAMILIES

PAGE = (Path(__file__).parents[2] / "docs" / "published-models.md").read_text()
NAME = "Kimi-Linear-48B-A3B-Instruct"
SHORT = {
    "train": ["--train.tokens=512", "--train.batch_tokens=256", "--train.row_length=64", "--train.eval_tokens=128",
              "--train.micro_batch_tokens=256"],
    "generate": ["--tokens", "5"],
}  # fmt: skip


def release(folder: Path, lines: list[str]) -> None:
    """A published folder of the page's name: a tiny hybrid and a tokenizer."""
    tokenizer = train_tokenizer(lines, 400)
    tree = {"width": 32, "depth": 4, "vocabulary": tokenizer.vocabulary_size, "first_dense": 1, "tied_head": False,
            "mixer": {"kind": "hybrid", "linear": {"kind": "delta_attention", "heads": 2},
                      "full": {"kind": "latent_attention", "heads": 2}},
            "feed_forward": {"kind": "mixture_of_experts", "experts": 4, "top_k": 2, "hidden": 16}}  # fmt: skip
    to_published(from_dict(Decoder.Config, tree).build(seed=0), folder, "kimi_linear")
    tokenizer.save(folder / "tokenizer.json")


def test_page_runs_as_written(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    corpus = tmp_path / "corpus"
    corpus.mkdir()
    lines = ["\n".join(f"def f{i}(x):\n    return x + {i * number}" for i in range(40)) for number in range(20)]
    for number, text in enumerate(lines):
        (corpus / f"{number}.py").write_text(text)
    release(tmp_path / NAME, lines)
    (commands,) = re.findall(r"^```bash\n(.*?)^```", PAGE, re.M | re.S)
    data = [f"--data.corpus={{kind = 'files', paths = ['{corpus}']}}", f"--runtime.cache={tmp_path / 'cache'}"]
    for line in commands.strip().splitlines():
        program, *arguments = shlex.split(line, comments=True)
        assert program == "triscale"
        extra = SHORT.get(arguments[0], []) + (data if arguments[0] == "train" else [])
        result = CliRunner().invoke(cli, [*arguments, *extra])
        assert result.exit_code == 0, (line, result.output, result.exception)
    trained = from_published("exported")
    assert trained.config == from_published(NAME).config
    assert not torch.equal(trained.embedding.weight, from_published(NAME).embedding.weight)
    (code,) = re.findall(r"^```python\n(.*?)^```", PAGE, re.M | re.S)
    names: dict = {}
    exec(code, names)
    assert names["logits"].shape == (1, 3, trained.config.vocabulary) and (tmp_path / "again" / "config.json").exists()


def test_page_names_every_format():
    assert re.findall(r"^\| `(\w+)` \|", PAGE, re.M) == ["llama", "deepseek_v3", "kimi_linear", "kimi_k25", "kimi_k3"]
    assert set(FAMILIES) == set(re.findall(r"^\| `(\w+)` \|", PAGE, re.M))

"""Shards: written in any order and in pieces, read back whole or in part; damage is named."""

import json
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from triscale.config import TriScaleError
from triscale.models.published.shards import INDEX, SafetensorsWriter, ShardReader, plan_shards, read_header

DTYPES = (torch.float32, torch.bfloat16, torch.uint8, torch.int64, torch.float8_e4m3fn)
SHAPES = st.lists(st.integers(0, 4), max_size=3).map(tuple)
TENSORS = st.dictionaries(st.sampled_from("abcdefgh"), st.tuples(SHAPES, st.sampled_from(DTYPES)), min_size=1)


def values(shape, dtype, seed=0):
    return (torch.rand(shape, generator=torch.Generator().manual_seed(seed)) * 100).to(dtype)


@given(TENSORS, st.randoms(use_true_random=False))
def test_pieces_in_any_order_make_the_file(tmp_path_factory, tensors, random):
    path = tmp_path_factory.mktemp("file") / "model.safetensors"
    expected = {name: values(shape, dtype, ord(name)) for name, (shape, dtype) in tensors.items()}
    pieces = []
    for name, tensor in expected.items():
        flat = tensor.reshape(-1)
        cuts = sorted({0, len(flat), *(random.randint(0, len(flat)) for _ in range(2))})
        pieces += [(name, flat[a:b], a) for a, b in pairwise(cuts)]
    random.shuffle(pieces)
    with SafetensorsWriter(path, tensors) as writer:
        for piece in pieces:
            writer.write(*piece)
    for name, tensor in load_file(path).items():
        assert tensor.dtype == expected[name].dtype and tensor.shape == expected[name].shape
        assert torch.equal(tensor.double(), expected[name].double())
    assert set(read_header(path)) == set(tensors)


def test_a_gap_leaves_no_file(tmp_path):
    with (
        pytest.raises(ValueError, match="not written once: a"),
        SafetensorsWriter(
            tmp_path / "x.safetensors", {"a": ((4,), torch.float32), "b": ((2,), torch.float32)}
        ) as writer,
    ):
        writer.write("a", torch.zeros(3))
        writer.write("b", torch.zeros(2))
    with pytest.raises(RuntimeError), SafetensorsWriter(tmp_path / "y", {"a": ((1,), torch.float32)}):
        raise RuntimeError("interrupted")
    assert list(tmp_path.iterdir()) == []


@given(st.lists(st.integers(0, 50), max_size=12), st.integers(1, 60))
def test_shards_hold_everything_once_within_the_limit(sizes, limit):
    named = {str(i): size for i, size in enumerate(sizes)}
    shards = plan_shards(named, limit)
    assert [name for shard in shards for name in shard] == list(named)
    for shard in shards:
        assert shard and (len(shard) == 1 or sum(named[n] for n in shard) <= limit)


def folder(path, weight_map=None):
    save_file({"a": torch.arange(12.0).view(3, 4), "b": torch.ones(2)}, path / "one.safetensors")
    save_file({"c": torch.ones(2)}, path / "two.safetensors")
    weight_map = weight_map or {"a": "one.safetensors", "b": "one.safetensors", "c": "two.safetensors"}
    (path / INDEX).write_text(json.dumps({"weight_map": weight_map}))
    return path


def test_parts_are_read_alone(tmp_path):
    with ShardReader(folder(tmp_path)) as reader:
        assert reader.read("a", (1, slice(1, 3))).tolist() == [5.0, 6.0]
        assert reader.read("a", (2,)).tolist() == [8.0, 9.0, 10.0, 11.0]
        assert reader.read("c").tolist() == [1.0, 1.0]
        assert [reader.tensors[n].file for n in reader.names_by_file()] == ["one.safetensors"] * 2 + ["two.safetensors"]


@pytest.mark.parametrize(
    ("weight_map", "message"),
    [
        ({"a": "one.safetensors", "b": "one.safetensors"}, None),
        ({"a": "one.safetensors", "b": "one.safetensors", "c": "three.safetensors"}, "lacks 1 of 2 shards"),
        ({"a": "one.safetensors", "c": "two.safetensors"}, "missing from"),
        ({"a": "one.safetensors", "b": "two.safetensors", "c": "two.safetensors"}, "b is in two.safetensors"),
    ],
)
def test_index_and_files_must_agree(tmp_path, weight_map, message):
    path = folder(tmp_path, weight_map)
    if message is None:
        assert set(ShardReader(path).tensors) == {"a", "b"}
        return
    with pytest.raises(TriScaleError, match=message):
        ShardReader(path)


def test_damage_is_named(tmp_path):
    with pytest.raises(TriScaleError, match="holds neither"):
        ShardReader(tmp_path)
    (tmp_path / "model.safetensors").write_bytes(b"not a file")
    with pytest.raises(TriScaleError, match=r"model\.safetensors is not a readable"):
        ShardReader(tmp_path)
    (tmp_path / INDEX).write_text("{}")
    with pytest.raises(TriScaleError, match="not a safetensors index"):
        ShardReader(tmp_path)

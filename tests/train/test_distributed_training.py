"""Training on several processes: the same losses and weights, clip and all; checkpoints move between rank counts."""

import os
import socket
from dataclasses import replace

import pytest
import torch
import torch.multiprocessing as mp

from triscale.events import current_events
from triscale.train.checkpoint import complete_checkpoints, load_checkpoint
from triscale.train.loop import Trainer

OPTIMIZER = {"kind": "muonclip", "lr": 0.01, "ns_dtype": "float32", "qk_clip_threshold": 0.05}


def worker(rank, ranks, port, config, runtime, path, stop):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    train(config, runtime, path, stop)
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown and abort the process after a passed test


def train(config, runtime, path, stop=None):
    """Run to the end, or stop as a user would after step ``stop``, which saves."""
    trainer = Trainer(config, runtime, path)
    if stop is not None:
        after = trainer._record

        def record(*arguments):
            after(*arguments)
            trainer.guard.requested = trainer.step >= stop

        trainer._record = record
    try:
        trainer.train()
    except Exception as error:
        if stop is None or type(error).__name__ != "Interrupted":
            raise


def on_ranks(ranks, config, runtime, path, stop=None):
    if ranks == 1:
        return train(config, runtime, path, stop)
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(worker, args=(ranks, port, config, runtime, path, stop), nprocs=ranks)


def losses(path):
    return [event.data["loss"] for event in current_events(path / "events.jsonl") if event.kind == "step"]


def clips(path):
    return [event.data["clipped"] for event in current_events(path / "events.jsonl") if event.kind == "logits"]


def weights(path):
    return load_checkpoint(complete_checkpoints(path / "checkpoints")[-1][1])[0]["model"]


@pytest.fixture
def config(make_config):
    return make_config({"optimizer": OPTIMIZER, "train": {"micro_batch_tokens": 64, "tokens": 20 * 256}})


def test_two_ranks_train_what_one_trains(config, runtime, tmp_path):
    on_ranks(1, config, runtime, tmp_path / "one")
    on_ranks(2, config, runtime, tmp_path / "two")
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), abs=1e-5)
    assert clips(tmp_path / "two") == clips(tmp_path / "one") and clips(tmp_path / "one")[-1] > 0
    for name, weight in weights(tmp_path / "one").items():
        assert torch.allclose(weights(tmp_path / "two")[name], weight, rtol=0, atol=1e-5), name


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 4])
def test_a_run_of_two_ranks_goes_on_with_another_number(ranks, config, runtime, tmp_path):
    on_ranks(1, config, runtime, tmp_path / "straight")
    on_ranks(2, config, runtime, tmp_path / "moved", stop=10)
    assert len(losses(tmp_path / "moved")) == 10
    on_ranks(ranks, config, runtime, tmp_path / "moved")
    assert losses(tmp_path / "moved") == pytest.approx(losses(tmp_path / "straight"), abs=1e-5)


def test_rows_that_do_not_divide_are_refused(config):
    from triscale.config import ConfigError
    from triscale.train.distributed import World

    world = World()
    world.size = 3
    with pytest.raises(ConfigError, match="multiple of"):
        world.share(4)
    assert replace(config).train.rows == 4

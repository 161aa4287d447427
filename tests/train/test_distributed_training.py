"""Training on several processes: the same losses and weights as one, and checkpoints that move between any numbers."""

import errno
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors import safe_open
from safetensors.torch import load_file

from triscale.config import ConfigError, dump_toml, overlay
from triscale.events import current_events
from triscale.train.checkpoint import CheckpointError, complete_checkpoints, load_checkpoint
from triscale.train.config import RunConfig, Runtime, resolved
from triscale.train.conversion import export_model
from triscale.train.distributed import PeerError, World
from triscale.train.interrupt import Interrupted, InterruptGuard
from triscale.train.load import load_run
from triscale.train.loop import Trainer
from triscale.train.run_directory import RunBusyError, RunDirectory
from triscale.train.sharded import is_sharded
from triscale.train.start import find_weights

STEPS, HALF = 12, 6
# odd sizes: no number of ranks divides the rows evenly; depth queries [1, 32] and per-head vectors [2] leave ranks empty
ODD = {
    "model": {
        "vocabulary": 301, "feed_forward": {"kind": "swiglu", "hidden": 37}, "residual": {"kind": "attention"},
        "mixer": {"kind": "hybrid", "linear": {"kind": "delta_attention", "heads": 2},
                  "full": {"kind": "grouped_query_attention", "heads": 2}},
    },
    "optimizer": {"kind": "muonclip", "lr": 0.01, "ns_dtype": "float32", "qk_clip_threshold": 0.05},
    "train": {"micro_batch_tokens": 64, "tokens": STEPS * 256},
}  # fmt: skip
EXPERTS = {
    "model": {"mixer": {"kind": "latent_attention", "heads": 2, "rope_theta": 10000.0}, "feed_forward": {"kind": "mixture_of_experts", "experts": 4, "hidden": 16, "sequence_loss": 1e-2},
              "first_dense": 1, "multi_token": {"weight": 0.3}},
    "optimizer": {"kind": "muonclip", "lr": 0.01, "ns_dtype": "float32"},
    "train": {"micro_batch_tokens": 64, "tokens": STEPS * 256},
}  # fmt: skip


@dataclass
class Job:
    """One run of a trainer; ``hurt`` breaks something first and expects the error."""

    config: RunConfig
    runtime: Runtime
    path: Path
    hurt: str = ""

    def train(self, rank: int) -> None:
        trainer = Trainer(self.config, self.runtime, self.path, keep_steps=(HALF,))
        if self.hurt:
            return HURT[self.hurt](trainer, rank)
        trainer.train()


def full_disk_on_one_rank(trainer, rank):
    from torch.distributed.checkpoint import HuggingFaceStorageWriter as Writer

    write = Writer.write_data

    def full(self, *arguments):
        if rank == 1 and trainer.step == STEPS:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(self, *arguments)

    Writer.write_data = full
    with pytest.raises(CheckpointError, match="disk is full"):
        trainer.train()
    Writer.write_data = write


def busy(trainer, rank):
    with pytest.raises(RunBusyError if rank == 0 else PeerError, match="another process"):
        trainer.train()


HURT = {"full disk": full_disk_on_one_rank, "busy": busy}


def rank_main(rank, ranks, port, jobs):
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), WORLD_SIZE=str(ranks), MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port)
    )
    dist.init_process_group("gloo")
    for job in jobs:
        job.train(rank)
    dist.barrier()
    os._exit(0)  # gloo's threads may outlive the interpreter's teardown and abort the process after a passed test


def on_ranks(ranks, *jobs):
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    mp.spawn(rank_main, args=(ranks, port, jobs), nprocs=ranks)


def losses(path):
    return [event.data["loss"] for event in current_events(path / "events.jsonl") if event.kind == "step"]


def clips(path):
    return [event.data["clipped"] for event in current_events(path / "events.jsonl") if event.kind == "logits"]


def checkpoint(path):
    return complete_checkpoints(path / "checkpoints")[-1][1]


def weights(path):
    return load_checkpoint(checkpoint(path), only=("model",))[0]["model"]


def stopped_half_way(path, copy):
    """A copy of a finished run as it was after half its steps."""
    shutil.copytree(path, copy)
    (copy / "result.json").unlink()
    shutil.rmtree(copy / "checkpoints" / f"step_{STEPS:08d}")
    return copy


def same(path, reference):
    assert losses(path) == pytest.approx(losses(reference), abs=1e-5)
    for name, weight in weights(reference).items():
        torch.testing.assert_close(weights(path)[name], weight, rtol=0, atol=1e-5, msg=lambda m, n=name: f"{n}: {m}")


@pytest.fixture(scope="module")
def runs(module_config, module_runtime, tmp_path_factory):
    """Runs of one and of two processes; ``moved`` was begun by one and finished by two."""
    folder, runtime = tmp_path_factory.mktemp("runs"), module_runtime
    odd, experts = module_config(ODD), module_config(EXPERTS)
    for name, config in (("one", odd), ("experts-one", experts)):
        Job(config, runtime, folder / name).train(0)
    stopped_half_way(folder / "one", folder / "moved")
    stopped_half_way(folder / "one", folder / "busy")
    with RunDirectory(folder / "busy").exclusive():
        on_ranks(
            2,
            Job(odd, runtime, folder / "two"),
            Job(odd, runtime, folder / "moved"),
            Job(experts, replace(runtime, expert_parallel=True), folder / "experts-two"),
            Job(odd, runtime, folder / "full", hurt="full disk"),
            Job(odd, runtime, folder / "busy", hurt="busy"),
        )
    return folder


@pytest.fixture(scope="module")
def module_runtime(tmp_path_factory):
    cache = str(tmp_path_factory.mktemp("cache"))
    return Runtime(device="cpu", threads=1, cache=cache, checkpoint_seconds=1e9)


def test_two_ranks_train_what_one_trains(runs):
    same(runs / "two", runs / "one")
    assert clips(runs / "two") == clips(runs / "one") and clips(runs / "one")[-1] > 0


def test_each_rank_writes_its_own_uneven_or_empty_part(runs):
    parts = sorted(checkpoint(runs / "two").glob("*.safetensors"))
    assert [part.name[:11] for part in parts] == ["shard-00001", "shard-00002"]
    shapes = []
    for part in parts:
        with safe_open(part, framework="pt") as file:
            shapes.append({name: file.get_slice(name).get_shape() for name in file.keys()})  # noqa: SIM118
    assert [s["embedding.weight"] for s in shapes] == [[151, 32], [150, 32]]
    queries = [name for name in shapes[0] if name.endswith("residual.proj.weight")]
    assert queries and all(shapes[1].get(name, [0, 32]) == [0, 32] for name in queries)
    assert "embedding.weight|exp_avg" in shapes[0] and any(n.endswith("|momentum") for n in shapes[1])


def test_a_run_of_one_rank_goes_on_with_two(runs):
    assert is_sharded(checkpoint(runs / "moved"))
    same(runs / "moved", runs / "one")


def test_a_run_of_two_ranks_goes_on_with_one(runs, module_config, module_runtime, tmp_path):
    path = stopped_half_way(runs / "two", tmp_path / "run")
    Job(module_config(ODD), module_runtime, path).train(0)
    assert not is_sharded(checkpoint(path))
    same(path, runs / "one")


def test_experts_spread_over_two_ranks_train_what_one_trains(runs, module_config, module_runtime, tmp_path):
    same(runs / "experts-two", runs / "experts-one")
    parts = sorted(checkpoint(runs / "experts-two").glob("*.safetensors"))
    for part in parts:
        with safe_open(part, framework="pt") as file:
            assert file.get_slice("layers.1.feed_forward.experts.down_proj").get_shape()[0] == 2  # whole experts
    path = stopped_half_way(runs / "experts-two", tmp_path / "run")
    Job(module_config(EXPERTS), module_runtime, path).train(0)
    same(path, runs / "experts-one")


def test_every_command_reads_what_two_ranks_wrote(runs, module_config, module_runtime, tmp_path):
    for name, weight in load_run(runs / "two", "cpu").model.state_dict().items():
        if name != "head.weight":  # tied
            assert torch.equal(weight, weights(runs / "two")[name]), name
    other = Trainer(module_config(ODD), module_runtime, tmp_path / "from", init_from=find_weights(runs / "two"))
    result = other.train()
    assert result["curve"][0][1] == pytest.approx(RunDirectory(runs / "two").result()["loss"], abs=1e-5)
    for name in ("experts-one", "experts-two"):
        export_model(runs / name, tmp_path / name, "deepseek_v3")
    one, two = (load_file(tmp_path / name / "model.safetensors") for name in ("experts-one", "experts-two"))
    assert one.keys() == two.keys() and len(one) > 20
    assert all(torch.allclose(one[name], two[name], rtol=0, atol=1e-5) for name in one)


@pytest.mark.parametrize("damage", ["flip", "remove"])
def test_a_damaged_or_missing_part_is_named(runs, tmp_path, damage):
    shutil.copytree(checkpoint(runs / "two"), tmp_path / "step")
    file = sorted((tmp_path / "step").glob("*.safetensors"))[1]
    if damage == "remove":
        file.unlink()
    else:
        content = bytearray(file.read_bytes())
        content[-5] ^= 16
        file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"shard-00002.*delete that folder to resume from the one before"):
        load_checkpoint(tmp_path / "step")


def test_a_full_disk_under_one_rank_stops_all_and_keeps_the_checkpoint_before(runs):
    assert [step for step, _ in complete_checkpoints(runs / "full" / "checkpoints")] == [HALF]
    assert not list((runs / "full" / "checkpoints").glob(".tmp*"))


@pytest.mark.slow
def test_four_ranks_go_on_where_one_or_two_stopped(runs, module_config, module_runtime, tmp_path):
    jobs = []
    for name, overrides in (("one", ODD), ("two", ODD), ("experts-two", EXPERTS)):
        stopped_half_way(runs / name, tmp_path / name)
        parallel = replace(module_runtime, expert_parallel=overrides is EXPERTS)
        jobs.append(Job(module_config(overrides), parallel, tmp_path / name))
    on_ranks(4, *jobs)
    for name in ("one", "two"):
        same(tmp_path / name, runs / "one")
    same(tmp_path / "experts-two", runs / "experts-one")
    Job(module_config(ODD), module_runtime, stopped_half_way(tmp_path / "two", tmp_path / "back")).train(0)
    same(tmp_path / "back", runs / "one")


def test_rows_and_experts_that_do_not_divide_are_refused(module_config):
    world = World(3)
    with pytest.raises(ConfigError, match="multiple of"):
        world.share(4)

    class Mesh:
        def size(self):
            return 3

    world.mesh = Mesh()
    model = module_config(overlay(EXPERTS, {"model": {"vocabulary": 300}})).model.build(seed=0)
    with pytest.raises(ConfigError, match=r"expert_parallel: experts: 4 cannot be split over 3 ranks"):
        world.shard(model, expert_parallel=True)


def test_a_signal_after_the_ranks_agreed_waits_for_the_next_agreement(module_config, module_runtime, tmp_path):
    """One rank alone must not stop on it, or the others wait for it in the step they agreed to make."""
    trainer = Trainer(module_config(), module_runtime, tmp_path / "run")
    trainer.guard = InterruptGuard()

    def agree(flag, device):
        trainer.guard.requested = True  # a signal between the exchange and the look at its result
        return flag

    trainer.world.agree = agree
    trainer._check_interrupt()
    with pytest.raises(Interrupted):
        trainer._check_interrupt()


@pytest.mark.parametrize("torchrun", [True, False])
def test_torchruns_own_signal_is_not_taken_for_a_second_ctrl_c(torchrun, monkeypatch):
    exits = []
    monkeypatch.setattr("triscale.train.interrupt.os._exit", exits.append)
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    if torchrun:
        monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    with InterruptGuard("") as guard:
        for _ in range(2):
            signal.raise_signal(signal.SIGINT)
        assert guard.requested and exits == ([] if torchrun else [130])


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_torchrun_is_interrupted_and_resumed(number, module_config, module_runtime, tmp_path):
    """Ctrl-C reaches the ranks twice, from the terminal and through torchrun: they still stop in order and save."""
    config = module_config(overlay(ODD, {"train": {"tokens": 60 * 256}}))
    straight = tmp_path / "straight"
    Job(config, module_runtime, straight).train(0)
    (tmp_path / "run.toml").write_text(dump_toml(resolved(config)))
    arguments = ["-m", "triscale", "train", str(tmp_path / "run.toml"), "--run-dir", str(tmp_path / "run"),
                 f"--runtime.cache={module_runtime.cache}", "--runtime.device=cpu"]  # fmt: skip
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *arguments]
    events = tmp_path / "run" / "events.jsonl"
    process = subprocess.Popen(
        torchrun, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True
    )
    while process.poll() is None and not (events.exists() and events.read_text().count('"kind": "step"') >= 3):
        time.sleep(0.02)
    if number == signal.SIGINT:
        os.killpg(process.pid, number)  # as a terminal does
    else:
        process.send_signal(number)
    output, text = process.communicate(timeout=120)

    assert process.returncode != 0 and output == ""
    assert text.count("stopping: saving") == 1 and text.count("the same command resumes") == 1
    end = [e for e in current_events(events) if e.kind == "run.end"][-1]
    assert end.data["outcome"] == "interrupted" and 3 <= end.data["step"] < 60
    assert complete_checkpoints(tmp_path / "run" / "checkpoints")[-1][0] == end.data["step"]

    again = subprocess.run(torchrun, capture_output=True, text=True, check=True)
    assert again.stdout.count("held-out loss") == again.stdout.count("run folder") == 1
    assert again.stderr.count("resuming after step") == 1
    same(tmp_path / "run", straight)
    finished = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=True)
    assert finished.stdout == again.stdout

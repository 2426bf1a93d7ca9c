"""Several processes, and batches taken in parts, learn what one process learns from whole batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from test_loop import SMALL, data, trainer
from together import STEPS, main, outcome
from variants import VARIANTS, make

from capvid.datasets.batches import Batch
from capvid.text.vocabulary import BOS, EOS, PAD
from capvid.training.objectives import TeacherForcedLoss
from capvid.training.optimization import shards_of

LAUNCH = [sys.executable, "-m", "accelerate.commands.launch", "--multi_gpu", "--num_processes", "2"]
LAUNCH += [
    "--num_machines",
    "1",
    "--mixed_precision",
    "no",
    "--dynamo_backend",
    "no",
    "--main_process_port",
    "0",
]


def launched(*command: str) -> str:
    """Run a command in two processes and give what it prints on stderr."""
    paths = [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH", "")]
    environment = {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "PYTHONPATH": os.pathsep.join(filter(None, paths)),
        "CUDA_VISIBLE_DEVICES": "",
    }
    done = subprocess.run([*LAUNCH, *command], env=environment, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.slow
@pytest.mark.parametrize("name", ["m3", "mart"])
def test_a_batch_in_parts_is_the_whole_batch(tmp_path: Path, name: str) -> None:
    found = []
    for parts in (1, 3, 9):  # 9 are more than the captions of a batch
        folder = tmp_path / str(parts)
        folder.mkdir()
        made = trainer(folder, name, *STEPS, "training.epochs=3", f"training.accumulate={parts}")
        made.run()
        found.append(outcome(made))
    for other in found[1:]:
        assert other["losses"] == pytest.approx(found[0]["losses"], abs=1e-5)
        assert other["weights"] == pytest.approx(found[0]["weights"], abs=1e-3)


def test_a_batch_is_not_taken_in_more_parts_than_it_has_captions(tmp_path: Path) -> None:
    made = trainer(tmp_path, "m3", *STEPS)
    shards = list(shards_of(made.batches, 1, 0, 500, made.accelerator))
    assert sorted(len(shard.micro_batches) for shard in shards) == [6, 7, 7]
    assert all(s.words == sum(int((b.targets != PAD).sum()) for b in s.micro_batches) for s in shards)


@pytest.mark.slow
def test_two_processes_learn_what_one_does(tmp_path: Path) -> None:
    """Unequal shares, batches in parts, paragraphs, self-critical samples; broken off and resumed."""
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    main(tmp_path / "one")
    launched(str(Path(__file__).parents[1] / "support" / "together.py"), str(tmp_path / "two"))
    one, two = (json.loads((tmp_path / name / "found.json").read_text()) for name in ("one", "two"))
    assert (one.pop("processes"), two.pop("processes")) == (1, 2)
    for found in (one, two):
        assert found.pop("broken") == found["whole"]
    one.pop("whole"), two.pop("whole")  # their dropout differs
    for name in one:
        a, b = one[name], two[name]
        assert b["losses"] == pytest.approx(a["losses"], abs=1e-5), name
        assert b["ciders"] == pytest.approx(a["ciders"], abs=1e-5), name
        assert b["weights"] == pytest.approx(a["weights"], abs=1e-2), name  # sums of up to thousands
        assert b["samples"] == a["samples"], name
        assert len(set(a["losses"])) == len(a["losses"]) > 1, name


@pytest.mark.slow
def test_the_command_in_two_processes(tmp_path: Path) -> None:
    """Twenty steps of ``capvid train``: the same losses to 1e-5, said once, in one run folder."""
    videos, _ = data(tmp_path)
    rows = [{"id": v.id, "split": v.split, "captions": v.captions} for v in videos]
    (tmp_path / "data.jsonl").write_text("\n".join(map(json.dumps, rows)))
    options = ["train", "m3-small", "--data", f"{tmp_path}/data.jsonl", "--device", "cpu"]
    options += ["--features", f"{tmp_path}/features.safetensors", "-o", f"{tmp_path}/two"]
    for setting in [*SMALL, "training.epochs=10"]:
        options += ["--set", setting]
    said = launched("-m", "capvid", *options)
    alone = trainer(tmp_path, "m3", "training.epochs=10")
    alone.run()
    rows = [json.loads(line) for line in (tmp_path / "two/metrics.jsonl").read_text().splitlines()]
    assert [row["loss"] for row in rows] == pytest.approx(outcome(alone)["losses"], abs=1e-5)
    assert said.count("epoch  10 ") == 1 and said.count("saved in") == 1
    assert json.loads((tmp_path / "two/run.json").read_text())["began"]["processes"] == 2


@pytest.mark.parametrize(
    "variant", [name for name, (kind, _) in VARIANTS.items() if "trans" not in kind and kind != "mart"]
)
def test_the_least_share_reaches_every_parameter(variant: str) -> None:
    """One word of one frame, or nothing but padding: else processes would wait for each other's gradients."""
    captioner = make(variant).float().eval()
    shape = (1, 1, captioner.config.locations, 5) if getattr(captioner.config, "locations", 0) else (1, 1, 5)
    features, mask = torch.randn(shape), torch.ones(1, 1, dtype=torch.bool)
    inputs = torch.tensor([[BOS, 5]])
    for targets in (torch.tensor([[5, EOS]]), torch.full((1, 2), PAD)):
        captioner.zero_grad(set_to_none=True)
        batch = Batch(features, mask, inputs, targets)
        TeacherForcedLoss(captioner, 0.1)(batch).backward()
        assert [name for name, p in captioner.named_parameters() if p.grad is None] == []

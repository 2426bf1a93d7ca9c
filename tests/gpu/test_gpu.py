"""The same numbers, captions and messages on CUDA as on the CPU.

``CAPVID_TEST_DEVICE=cpu python -m pytest -m gpu tests/gpu`` checks these tests without a GPU.
"""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from small_training import (
    MAP_CAPTIONERS,
    SIZES,
    SMALL_M3,
    SilentReporter,
    StopAfterSteps,
    StoppedError,
    small_trainer,
    write_dataset,
)
from test_all_backbones import as_backbone, network_input, with_random_weights
from torch import nn
from toy import write_video

import capvid
from capvid.backbones.backbone import load_backbone, start_threads
from capvid.backbones.catalog import backbones, build_network, captioners
from capvid.captioners.base import CAPTIONERS
from capvid.captioners.checkpoint import load_checkpoint
from capvid.errors import CapvidError
from capvid.features.extraction import extract
from capvid.features.feature_file import save_features
from capvid.pipeline import CaptionPipeline
from capvid.training.optimization import bf16_in_hardware
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

DEVICE = torch.device(os.environ.get("CAPVID_TEST_DEVICE", "cuda"))
CPU = torch.device("cpu")
CUDA = DEVICE.type == "cuda"
ROOT = Path(__file__).parents[2]
BUNDLED = sorted(name for name, entry in captioners().items() if entry.bundled)

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(CUDA and not torch.cuda.is_available(), reason="torch finds no CUDA device"),
]


@pytest.fixture(autouse=True)
def full_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    """Compare float32 with float32, not with TF32."""
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("clips")
    return [write_video(folder / f"{n}.mp4", seed=n, frames=20 + 9 * n, size=(160, 120)) for n in range(3)]


def feature_files(pipeline: CaptionPipeline, clips: list[Path], folder: Path) -> list[Path]:
    """Write the clips' features in float32 for the captioner, computed on the CPU."""
    streams = pipeline.generator.checkpoint.header.streams
    networks = [
        load_backbone(str(stream.backbone), layer=stream.layer, precision="fp32") for stream in streams
    ]
    files = []
    for result in extract(clips, networks, pipeline.sampling):
        assert result.features is not None
        files.append(folder / f"{Path(str(result.path)).stem}.safetensors")
        save_features(files[-1], result.features)
    return files


# Captioning


@pytest.mark.parametrize("beam_size", [1, 5])
@pytest.mark.parametrize("name", BUNDLED)
def test_same_features_give_the_same_captions(
    name: str, beam_size: int, clips: list[Path], tmp_path: Path
) -> None:
    pipelines = [capvid.load(name, device=device, beam_size=beam_size) for device in ("cpu", str(DEVICE))]
    files = feature_files(pipelines[0], clips, tmp_path)
    cpu_results, device_results = (list(pipeline.stream(files)) for pipeline in pipelines)
    for cpu, device in zip(cpu_results, device_results, strict=True):
        assert cpu.error is None and device.error is None
        assert [c.text for c in device.captions] == [c.text for c in cpu.captions]
        for expected, caption in zip(cpu.captions, device.captions, strict=True):
            assert caption.logprob == pytest.approx(expected.logprob, abs=1e-3 * (len(expected.words) + 1))


@pytest.mark.parametrize("name", BUNDLED)
def test_clip_captions_are_equally_likely(name: str, clips: list[Path]) -> None:
    """Half precision may flip near ties, but not change the likelihood of the best caption."""
    cpu_results, device_results = (
        list(capvid.load(name, device=device).stream(clips)) for device in ("cpu", str(DEVICE))
    )
    for cpu, device in zip(cpu_results, device_results, strict=True):
        assert cpu.error is None and device.error is None
        (expected,), (caption,) = cpu.captions, device.captions
        assert caption.mean_logprob == pytest.approx(expected.mean_logprob, abs=0.05)
        assert caption.text == expected.text or caption.logprob == pytest.approx(expected.logprob, abs=0.25)


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="Ray is not installed")
@pytest.mark.timeout(280)
def test_ray_actors_give_the_same_captions(clips: list[Path], tmp_path: Path) -> None:
    texts = {}
    for engine in ("local", "ray"):
        command = [sys.executable, "-m", "capvid", "caption", str(clips[0].parent), "--engine", engine]
        command += ["--output-dir", str(tmp_path / engine), "--format", "jsonl", "--device", DEVICE.type]
        command += ["--videos-per-file", "8"]
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        completed = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=250)
        assert completed.returncode == 0, completed.stderr
        (shard,) = (tmp_path / engine).glob("captions-*.jsonl")
        records = map(json.loads, shard.read_text().splitlines())
        texts[engine] = {record["video"]: record["captions"][0]["text"] for record in records}
    assert len(texts["ray"]) == len(clips) and texts["ray"] == texts["local"]


# Backbones


@pytest.mark.parametrize("name", sorted(backbones()))
@torch.inference_mode()
def test_backbones_compute_the_same_features(name: str) -> None:
    entry = backbones()[name]
    layer = entry.default_layer
    backbone = as_backbone(entry, layer, with_random_weights(build_network(entry, layer)))
    frames = np.random.default_rng(0).integers(0, 256, (1, 48, 64, 3), dtype=np.uint8)
    crops = backbone.prepare(frames)
    expected = torch.from_numpy(backbone.compute(crops))
    images = network_input(entry)
    single = backbone.module(images)
    scale = float(single.abs().max())
    on_device = replace(backbone, module=backbone.module.to(DEVICE), device=DEVICE)
    features = torch.from_numpy(on_device.compute(crops))
    torch.testing.assert_close(features, expected, rtol=2e-3, atol=2e-3 * float(expected.abs().max()))
    on_device_output = on_device.module(images.to(DEVICE)).cpu()
    torch.testing.assert_close(on_device_output, single, rtol=2e-3, atol=2e-3 * scale)
    if entry.half is False or not CUDA:  # CPUs without fast half precision would take minutes
        return
    for dtype, similarity in ((torch.float16, 0.999), (torch.bfloat16, 0.98)):
        output = on_device.module.to(dtype)(images.to(DEVICE, dtype)).float().cpu()
        if dtype is torch.float16 and not output.isfinite().all():
            assert not entry.half, "overflow in float16, which the registry declares safe"
            continue
        assert torch.cosine_similarity(output.flatten(), single.flatten(), dim=0) > similarity


@pytest.mark.parametrize("precision", ["fp32", "fp16", "bf16"] if CUDA else ["fp32"])
def test_bundled_backbone_in_every_precision(precision: str) -> None:
    """Several batches in all threads, through pinned memory on CUDA, keep their order."""
    frames = np.random.default_rng(0).integers(0, 256, (50, 96, 128, 3), dtype=np.uint8)
    expected = torch.from_numpy(load_backbone("capvid-small", precision="fp32")(frames))
    backbone = load_backbone("capvid-small", device=DEVICE, precision=precision)
    features = torch.from_numpy(backbone(frames, batch_size=8))
    similarity = torch.cosine_similarity(features, expected, dim=1)
    assert similarity.min() > {"fp32": 0.99999, "fp16": 0.999, "bf16": 0.99}[precision]
    closest = torch.cdist(features, expected).argmin(1)
    assert precision == "bf16" or closest.tolist() == list(range(50))


def test_threads_compute_concurrently() -> None:
    backbone = load_backbone("colour-grid", device=DEVICE)
    count = backbone.concurrency
    assert count == 2 or not CUDA
    pool = start_threads(DEVICE, backbone.threads, count)
    barrier = threading.Barrier(count)

    def product(number: int) -> Any:
        barrier.wait(timeout=60)  # passed only if all threads run concurrently
        stream = torch.cuda.current_stream().cuda_stream if CUDA else threading.get_ident()
        return (
            torch.full((64, 64), float(number), device=DEVICE) @ torch.eye(64, device=DEVICE)
        ).cpu(), stream

    results = [future.result() for future in [pool.submit(product, n) for n in range(count)]]
    assert [int(result[0, 0]) for result, _ in results] == list(range(count))
    assert len({stream for _, stream in results}) == count


class OutOfMemoryModule(nn.Module):
    def forward(self, images: torch.Tensor) -> torch.Tensor:
        raise torch.cuda.OutOfMemoryError("out of memory")


def test_out_of_memory_error_names_the_remedy() -> None:
    backbone = load_backbone("capvid-small", device=DEVICE, precision="fp32")
    frames = np.zeros((64, 128, 128, 3), np.uint8)
    if not CUDA:
        backbone = replace(backbone, module=OutOfMemoryModule())
    else:
        torch.cuda.empty_cache()
        torch.cuda.set_per_process_memory_fraction(1e-5)
    try:
        with pytest.raises(CapvidError, match=r"has not enough memory for .* frames of capvid-small; use a"):
            backbone(frames, batch_size=64)
    finally:
        if CUDA:
            torch.cuda.set_per_process_memory_fraction(1.0)
    assert np.isfinite(load_backbone("capvid-small", device=DEVICE)(frames[:2])).all()


# Training


def toy_trainer(folder: Path, name: str, *settings: str, device: torch.device = DEVICE) -> Trainer:
    folder.mkdir(parents=True, exist_ok=True)
    videos, store = write_dataset(folder, maps=name in MAP_CAPTIONERS, paragraphs=CAPTIONERS[name].paragraphs)
    return small_trainer(folder, name, videos, store, *settings, device=device)


def train_losses(trainer: Trainer) -> list[float]:
    trainer.run()
    assert load_checkpoint(trainer.folder).name == trainer.recipe.captioner
    return [row["loss"] for row in trainer.progress.rows]


@pytest.mark.parametrize("name", sorted(SIZES))
def test_training_has_the_same_losses(name: str, tmp_path: Path) -> None:
    epochs = "training.epochs=3"
    expected = train_losses(toy_trainer(tmp_path / "cpu", name, epochs, device=CPU))
    assert train_losses(toy_trainer(tmp_path / "gpu", name, epochs)) == pytest.approx(expected, rel=0.01)
    if bf16_in_hardware(DEVICE) or CUDA:
        half = train_losses(toy_trainer(tmp_path / "bf16", name, epochs, "training.precision=bf16"))
        assert half == pytest.approx(expected, rel=0.05)


@pytest.mark.parametrize("name", ["m3", "dense-lstm", "mart"])
def test_resumed_run_equals_an_undisturbed_one(name: str, tmp_path: Path) -> None:
    settings = ["model.dropout=0.3", "training.batch_size=5", "training.epochs=3", "training.save_every=0.0"]
    undisturbed = toy_trainer(tmp_path / "undisturbed", name, *settings)
    undisturbed.run()
    stopped = toy_trainer(tmp_path / "resumed", name, *settings)
    stopped.reporter = StopAfterSteps(6)
    with pytest.raises(StoppedError):
        stopped.run()
    torch.manual_seed(999)  # the random state must come from the saved run
    resumed = Trainer(
        stopped.recipe,
        videos=stopped.videos,
        store=stopped.store,
        folder=stopped.folder,
        device=DEVICE,
        reporter=SilentReporter(),
        resume=True,
    )
    resumed.run()
    assert logged_losses(resumed) == pytest.approx(logged_losses(undisturbed), rel=1e-3)
    expected = load_checkpoint(undisturbed.folder / "last").captioner.state_dict()
    for key, tensor in load_checkpoint(resumed.folder / "last").captioner.state_dict().items():
        torch.testing.assert_close(tensor, expected[key], rtol=1e-2, atol=1e-3)


def logged_losses(trainer: Trainer) -> list[float]:
    rows = (trainer.folder / "metrics.jsonl").read_text().splitlines()
    return [json.loads(row)["loss"] for row in rows]


def test_self_critical_training_raises_the_reward(tmp_path: Path) -> None:
    trained = toy_trainer(tmp_path, "m3", "training.epochs=6", "training.average=0.0")
    trained.run()
    settings = ["learning_rate=4e-3", "epochs=6", "patience=6", "batch_size=5", "samples=8"]
    fine_tuned = Trainer(
        load_recipe(
            "m3-small", [*SMALL_M3, "training.average=0.0", *(f"self_critical.{s}" for s in settings)]
        ),
        start=load_checkpoint(trained.folder),
        videos=trained.videos,
        store=trained.store,
        folder=tmp_path / "fine",
        device=DEVICE,
        reporter=SilentReporter(),
    )
    fine_tuned.run()
    rows = logged_losses(fine_tuned)  # minus the reward of the sampled captions
    assert len(rows) == 6 and rows[-1] < rows[0]

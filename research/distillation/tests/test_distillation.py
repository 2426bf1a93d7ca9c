"""Distillation: the losses against plain arithmetic, learning, resuming, and what is kept."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import typer
from distillation.__main__ import distil
from distillation.distiller import DistilInputs, make_distiller
from distillation.images import find_images, random_views
from distillation.recipe import TeacherOptions, load_distil_recipe
from distillation.targets import (
    BatchTargets,
    ClassHead,
    DistillationLoss,
    TeacherLoss,
    caption_words,
    stored_features,
    teacher_features,
)
from distilling import CPU, StoppedError, Stopping, recipe, run, toy_inputs, two_colour_image
from safetensors.torch import load_file
from typer.testing import CliRunner

from capvid.backbones.backbone import load_backbone
from capvid.backbones.catalog import StreamHeader, backbone_entry, backbones, build_network
from capvid.errors import CheckpointError, DataError, UsageError
from capvid.features.feature_file import FeatureHeader, Features, save_features
from capvid.features.feature_store import FeatureStore
from capvid.utils.files import sha256_file

pytestmark = pytest.mark.slow


@pytest.fixture
def inputs(tmp_path: Path) -> DistilInputs:
    return toy_inputs(tmp_path)


@pytest.mark.slow
def test_learns_and_keeps_a_backbone_that_can_be_loaded(inputs: DistilInputs, tmp_path: Path) -> None:
    records = run(recipe(epochs=6, learning_rate=2e-3), inputs, tmp_path / "run")
    assert records[-1]["loss"] < 0.9 * records[0]["loss"]
    assert records[-1]["val_words"] < 0.7 * records[0]["val_words"]
    backbone = load_backbone("capvid-small", weights=tmp_path / "run" / "capvid-small.safetensors")
    frames = np.random.default_rng(0).integers(0, 255, (3, 60, 90, 3), np.uint8)
    features = backbone(frames)
    assert features.shape == (3, 1280)
    assert np.isfinite(features).all()
    assert backbone.header.weights_sha256 == sha256_file(tmp_path / "run" / "capvid-small.safetensors")
    log = (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()
    assert [json.loads(line)["epoch"] for line in log] == list(range(1, 7))


@pytest.mark.slow
def test_resumed_run_ends_like_an_uninterrupted_one(inputs: DistilInputs, tmp_path: Path) -> None:
    """With views of their own as well, whose kind is drawn for each batch."""
    toy = recipe(views=1)
    whole = run(toy, inputs, tmp_path / "whole")

    with pytest.raises(StoppedError):
        make_distiller(toy, inputs, folder=tmp_path / "parts", device=CPU, reporter=Stopping()).run()
    rest = run(toy, inputs, tmp_path / "parts", resume=True)
    assert [record["epoch"] for record in rest] == [3]
    for key in ("loss", "val_colour-grid"):
        assert rest[-1][key] == pytest.approx(whole[-1][key], abs=1e-6)
    ours, theirs = (load_file(tmp_path / name / "capvid-small.safetensors") for name in ("whole", "parts"))
    for name, tensor in ours.items():
        torch.testing.assert_close(theirs[name], tensor, atol=1e-3, rtol=1e-3)


@pytest.mark.slow
def test_another_recipe_is_not_resumed_but_for_its_epochs(inputs: DistilInputs, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="no state to resume"):
        run(recipe(), inputs, tmp_path / "run", resume=True)
    run(recipe(epochs=1), inputs, tmp_path / "run")
    with pytest.raises(CheckpointError, match="another recipe"):
        run(recipe(epochs=2, temperature=3.0), inputs, tmp_path / "run", resume=True)
    more = run(recipe(epochs=2), inputs, tmp_path / "run", resume=True)
    assert [record["epoch"] for record in more] == [2]


def test_teacher_loss_is_the_printed_arithmetic() -> None:
    generator = torch.Generator().manual_seed(3)
    features = torch.rand(20, 5, generator=generator) * 4
    head = ClassHead(
        {
            "a.weight": torch.randn(7, 5, 1, 1, generator=generator),
            "a.bias": torch.randn(7, generator=generator),
            "b.weight": torch.randn(3, 7, generator=generator),
            "b.bias": torch.randn(3, generator=generator),
        },
        ["a", "b"],
    )
    options = TeacherOptions(layer="x", features=2.0, classes=0.25)
    loss = TeacherLoss(features, head, options, embedding=6, temperature=3.0)
    embedding, true = torch.randn(4, 6, generator=generator), torch.rand(4, 5, generator=generator)
    found, error = loss(embedding, true)

    roots = features.numpy() ** 0.5
    mean, deviation = roots.mean(0), roots.std(0, ddof=1)
    told = embedding.numpy() @ loss.tell.weight.detach().numpy().T + loss.tell.bias.detach().numpy()
    wanted = (true.numpy() ** 0.5 - mean) / deviation
    squared = ((told - wanted) ** 2).mean()
    assert float(error.detach()) == pytest.approx(squared, rel=1e-5)

    def classes(vector: np.ndarray) -> np.ndarray:
        a, b = head.layers
        hidden = np.maximum(a.weight.numpy() @ vector + a.bias.numpy(), 0)
        scores = np.exp((b.weight.numpy() @ hidden + b.bias.numpy()) / 3.0)
        return scores / scores.sum()

    divergence = 0.0
    for row in range(4):
        p = classes(true[row].numpy())
        q = classes(np.maximum(told[row] * deviation + mean, 0) ** 2)
        divergence += float((p * np.log(p / q)).sum()) / 4
    assert float(found.detach()) == pytest.approx(2 * squared + 0.25 * divergence, rel=1e-4)


def test_words_are_learned_from_pictures_with_captions_alone() -> None:
    lessons = DistillationLoss({}, embedding=2, words=3, word_weight=0.5)
    embedding = torch.randn(3, 2, generator=torch.Generator().manual_seed(1), requires_grad=True)
    shares = torch.tensor([[1.0, 0.0, 0.5], [0.0, 0.0, 0.0], [0.2, 1.0, 0.0]])
    known = torch.tensor([True, False, True])
    total, parts = lessons(embedding, BatchTargets({}, shares, known))
    scores = lessons.words(embedding[known]).detach().numpy()
    chance = 1 / (1 + np.exp(-scores))
    target = shares[known].numpy()
    plain = -(target * np.log(chance) + (1 - target) * np.log(1 - chance)).sum() / 2
    assert parts["words"] == pytest.approx(plain, rel=1e-5)
    assert float(total.detach()) == pytest.approx(0.5 * plain, rel=1e-5)
    total.backward()
    assert embedding.grad is not None
    assert bool((embedding.grad[1] == 0).all())
    assert bool((embedding.grad[0] != 0).any())


def test_words_of_captions(inputs: DistilInputs) -> None:
    images = find_images(inputs.images)
    captions = {"video0": ["a red thing", "it moves"], "video1": ["a green thing"], "set/3": ["things"]}
    found = caption_words(images, captions, 10)
    assert set(found.vocabulary) == {"thing", "red", "moves", "green", "things"}
    assert found.vocabulary[0] == "thing"
    rows = {item.name: row for row, item in enumerate(images)}
    column = found.vocabulary.index("thing")
    assert found.shares[rows["video0/002"], column] == 0.5
    assert found.shares[rows["video1/000"], column] == 1
    assert found.known[rows["set/3"]]
    assert not found.known[rows["set/4"]]


def test_features_computed_before_are_taken(inputs: DistilInputs, tmp_path: Path) -> None:
    stream = np.arange(4 * 192, dtype=np.float32).reshape(4, 192)
    header = FeatureHeader(
        streams=(StreamHeader(backbone="colour-grid", layer="grid", width=192),),
        sampling=None,
        reader=None,
        dtype="float32",
        capvid_version="0",
    )
    for video in ("video2", "elsewhere"):
        save_features(
            tmp_path / "features" / f"{video}.safetensors",
            Features(header=header, streams=(stream,), times=np.arange(4.0), video=video),
        )
    images = find_images(inputs.images)
    store = FeatureStore([tmp_path / "features"])
    found = stored_features(images, [store])["colour-grid:grid"]
    rows = {item.name: row for row, item in enumerate(images)}
    assert set(found) == {rows[f"video2/{n:03}"] for n in range(4)}
    np.testing.assert_array_equal(found[rows["video2/003"]], stream[3])
    (tmp_path / "photos" / "video2").mkdir()
    (tmp_path / "photos" / "video2" / "more.png").write_bytes(two_colour_image(1))
    with pytest.raises(DataError, match="5 images, but features of 4 frames"):
        stored_features(find_images(inputs.images), [store])


def test_views_show_part_of_the_picture() -> None:
    """In neutral light a view of a ramp is a shorter, perhaps mirrored ramp of the same image."""
    ramp = torch.arange(64, dtype=torch.uint8).mul(4).expand(3, 48, 64)
    generator = torch.Generator().manual_seed(2)
    seen = random_views(ramp.expand(50, 3, 48, 64), (24, 32), least_area=0.4, generator=generator)
    assert seen.shape == (50, 3, 24, 32)
    assert float(seen.min()) >= 0
    assert float(seen.max()) <= 255
    steps = seen.mean((1, 2)).diff(dim=-1)
    rising = (steps >= -1e-3).all(-1)
    falling = (steps <= 1e-3).all(-1)
    assert bool((rising | falling).all())
    assert 10 < int(rising.sum()) < 40
    assert seen.flatten(1).mean(1).std() > 5


def test_the_same_seed_gives_the_same_views() -> None:
    images = torch.randint(0, 255, (4, 3, 20, 20), dtype=torch.uint8)
    first, second, other = (
        random_views(images, (16, 16), least_area=0.5, generator=torch.Generator().manual_seed(seed))
        for seed in (1, 1, 2)
    )
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_bad_pictures_and_recipes_are_named(inputs: DistilInputs, tmp_path: Path) -> None:
    broken = tmp_path / "broken"
    broken.mkdir()
    (broken / "x.jpg").write_bytes(b"not an image")
    with pytest.raises(DataError, match="x: not an image"):
        run(recipe(), replace(inputs, images=[*inputs.images, broken]), tmp_path / "run")
    with pytest.raises(DataError, match="no images in it"):
        find_images([tmp_path / "run"])
    with pytest.raises(DataError, match="no such folder or zip file"):
        find_images([tmp_path / "nothing.zip"])
    with pytest.raises(DataError, match="neither a folder nor a zip file"):
        find_images([broken / "x.jpg"])
    with pytest.raises(DataError, match="no image belongs to the val split"):
        run(recipe(), replace(inputs, videos=inputs.videos[:2]), tmp_path / "run2")
    with pytest.raises(UsageError, match=r"training\.epoch: no such option"):
        recipe(epoch=3)
    with pytest.raises(UsageError, match="batch_size must be an integer between 1 and 65536, got 0"):
        recipe(batch_size=0)


def test_kept_features_are_of_the_same_layer_and_given_features(inputs: DistilInputs, tmp_path: Path) -> None:
    images, path = find_images(inputs.images), tmp_path / "kept.safetensors"

    def seen(known: dict[int, np.ndarray]) -> np.ndarray:
        return teacher_features(images, "colour-grid", "grid", known=known, path=path)

    computed = seen({})
    given = seen({3: np.full(192, 2.5, np.float32)})
    assert (given[3] == 2.5).all()
    np.testing.assert_array_equal(np.delete(given, 3, 0), np.delete(computed, 3, 0))
    before = path.stat().st_mtime_ns
    np.testing.assert_array_equal(seen({3: np.full(192, 2.5, np.float32)}), given)
    assert path.stat().st_mtime_ns == before  # found, not computed again


@pytest.mark.slow
def test_what_resuming_and_small_data_say(inputs: DistilInputs, tmp_path: Path) -> None:
    with pytest.raises(DataError, match="do not fill a batch of 100"):
        run(recipe(batch_size=100), inputs, tmp_path / "small")
    run(recipe(epochs=1), inputs, tmp_path / "run")
    kept = tmp_path / "run" / "capvid-small.safetensors"
    before = kept.read_bytes()
    kept.unlink()
    (tmp_path / "run" / "metrics.jsonl").unlink()
    assert run(recipe(epochs=1), inputs, tmp_path / "run", resume=True) == []
    assert kept.read_bytes() == before  # stopped after its last epoch, before the backbone was kept
    fewer = replace(inputs, videos=[replace(video, captions=("x",)) for video in inputs.videos])
    with pytest.raises(CheckpointError, match="other data"):
        run(recipe(epochs=2), fewer, tmp_path / "run", resume=True)


@torch.inference_mode()
def test_an_untrained_student_tells_pictures_apart() -> None:
    """What it sees does not die away through its layers, though nothing normalises it."""
    torch.manual_seed(1)
    images = torch.rand(4, 3, 1, 1) + torch.rand(4, 3, 128, 176) - 1
    embedding = build_network(backbone_entry("capvid-small"), "embedding")(images)  # (4, 1280)
    assert float(embedding.std(0).mean()) > 0.02


def test_student_is_small() -> None:
    network = build_network(backbone_entry("capvid-small"), "embedding")
    assert sum(parameter.numel() for parameter in network.parameters()) <= 5_000_000


def test_the_recipe_of_the_bundled_backbone_names_known_layers() -> None:
    bundled = load_distil_recipe("capvid-small-backbone", ["training.epochs=2"])
    assert backbones()[bundled.backbone].kind == "capvid-small" and bundled.training.epochs == 2
    layers = {teacher: backbones()[teacher].layers for teacher in bundled.teachers}
    assert all(options.layer in layers[teacher] for teacher, options in bundled.teachers.items())


@pytest.mark.parametrize(
    ("text", "message"),
    [("teachers = 1", "teachers must be a table"), ("teachers.a = 1", "teachers.a must be a table")],
)
def test_recipes_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "recipe.toml"
    path.write_text(f'backbone = "capvid-small"\n{text}')
    with pytest.raises(UsageError, match=message):
        load_distil_recipe(str(path))


def test_the_command_distils_once(inputs: DistilInputs, tmp_path: Path) -> None:
    (tmp_path / "toy.toml").write_text(
        'backbone = "capvid-small"\nteachers.colour-grid.layer = "grid"\n'
        'training = { epochs = 1, batch_size = 8, words = 4, precision = "fp32" }\n'
    )
    rows = [{"id": v.id, "split": v.split, "captions": list(v.captions)} for v in inputs.videos]
    (tmp_path / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = [
        str(tmp_path / "toy.toml"),
        "--data",
        f"jsonl:{tmp_path / 'data.jsonl'}",
        "-o",
        str(tmp_path / "run"),
    ]
    command += [text for path in inputs.images for text in ("--pictures", str(path))]
    app = typer.Typer()
    app.command()(distil)
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert "epoch   1  loss" in result.output and "capvid-small.safetensors" in result.output
    assert (tmp_path / "run" / "capvid-small.safetensors").is_file()
    again = CliRunner().invoke(app, command)
    assert again.exit_code == 2 and "holds a training run already" in again.output

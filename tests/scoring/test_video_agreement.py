"""CLIPScore and EMScore of videos, against a plain re-computation with transformers alone."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import forked
import numpy as np
import pytest
import torch
from hub_server import COMMIT, FakeHub, environment
from PIL import Image
from tiny_encoders import ENCODERS
from toy import Run, capvid, write_video

from capvid.errors import CheckpointError, DataError, UsageError
from capvid.scoring.video_agreement import score_agreement
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import read_frames
from capvid.vlm.image_text import load_encoder

__all__ = ["capvid"]

LONG = "a man is cooking in the kitchen the dog is running fast in the field a woman is in the kitchen"
CAPTIONS = {"v0": "a man is cooking", "v1": "A dog is running fast", "v2": LONG}
REFERENCES = {
    "v0": ["a man is cooking in the kitchen", "a woman is cooking"],
    "v1": ["a dog is running in the field", "the dog is fast", "a photo"],
    "v2": ["a man is in the kitchen"],
}
SAMPLING = "uniform:3"
NOWHERE = "http://127.0.0.1:9"


@pytest.fixture(scope="module")
def towers(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    home = tmp_path_factory.mktemp("towers")
    for name, make in ENCODERS.items():
        make(home / name)
    return {name: home / name for name in ENCODERS}


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("clips")
    for n in range(3):
        write_video(home / f"v{n}.mp4", seed=n, frames=4 + 3 * n)
    return home


class Plain:
    """The scores of one video at a time, word by word."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModel, AutoTokenizer

        self.model = AutoModel.from_pretrained(folder).eval()
        self.tokenizer = AutoTokenizer.from_pretrained(folder)
        self.clip = self.model.config.model_type == "clip"
        self.limit = self.model.config.text_config.max_position_embeddings

    def ids(self, text: str) -> list[int]:
        ids: list[int] = self.tokenizer(text.lower())["input_ids"]
        return ids if len(ids) <= self.limit else [*ids[: self.limit - 1], ids[-1]]

    @torch.inference_mode()
    def text(self, text: str) -> tuple[np.ndarray, np.ndarray]:
        ids = self.ids(text)
        padded = torch.tensor([ids + [0] * (self.limit - len(ids))])
        sentence = self.model.get_text_features(input_ids=padded).pooler_output[0]
        hidden = self.model.text_model(input_ids=padded).last_hidden_state[0, : len(ids)]
        tokens = self.model.text_projection(hidden) if self.clip else self.model.text_model.head(hidden)
        return unit(sentence.double().numpy()), unit(tokens.double().numpy())

    @torch.inference_mode()
    def frames(self, path: Path) -> np.ndarray:
        frames = read_frames(path, UniformSampling(3)).frames
        images = []
        for frame in frames:
            image = Image.fromarray(frame)
            if self.clip:  # 64 x 48 to a short side of 32, then the centre
                scaled = image.resize((42, 32), Image.Resampling.BICUBIC, box=(0, 0, 64, 48))
                box = (5 * 64 / 42, 0, 37 * 64 / 42, 48)
                del scaled
                image = image.resize((32, 32), Image.Resampling.BICUBIC, box=box)
            else:
                image = image.resize((32, 32), Image.Resampling.BILINEAR)
            images.append((np.asarray(image) / 255 - [0.5, 0.4, 0.5]) / [0.5, 0.5, 0.6])
        pixels = torch.tensor(np.stack(images), dtype=torch.float32).permute(0, 3, 1, 2)
        return unit(self.model.get_image_features(pixel_values=pixels).pooler_output.double().numpy())

    def idf(self) -> dict[int, float]:
        corpus = [self.ids(text) for texts in REFERENCES.values() for text in texts]
        idf = {
            token: math.log((len(corpus) + 1) / (sum(token in ids for ids in corpus) + 1))
            for ids in corpus
            for token in ids
        }
        idf[self.tokenizer.eos_token_id] = sum(idf.values()) / len(idf)
        return idf

    def weights(self, text: str) -> list[float]:
        idf = self.idf()
        unseen = math.log(sum(map(len, REFERENCES.values())) + 1)
        values = [idf.get(token, unseen) for token in self.ids(text)]
        return [value / sum(values) for value in values]

    def match(self, words: np.ndarray, weights: list[float], others: np.ndarray, by: list[float]) -> float:
        precision = sum(w * max(float(a @ b) for b in others) for a, w in zip(words, weights, strict=True))
        recall = sum(w * max(float(a @ b) for a in words) for b, w in zip(others, by, strict=True))
        return 2 * precision * recall / (precision + recall)

    def scores(self, caption: str, references: list[str], path: Path) -> dict[str, float]:
        frames = self.frames(path)
        video = unit(frames.mean(0))
        prompted = self.text("A photo depicts " + caption)[0]
        clip_score = 2.5 * max(0.0, float(prompted @ video))
        near = max(0.0, *[float(prompted @ self.text("A photo depicts " + one)[0]) for one in references])
        sentence, words = self.text(caption)
        coarse = float(sentence @ video)
        fine = self.match(words, self.weights(caption), frames, [1 / len(frames)] * len(frames))
        by_reference = []
        for one in references:
            other, others = self.text(one)
            matched = self.match(words, self.weights(caption), others, self.weights(one))
            by_reference.append((float(sentence @ other), matched))
        with_references = (max(c for c, _ in by_reference) + max(f for _, f in by_reference)) / 2
        return {
            "CLIPScore": clip_score,
            "RefCLIPScore": 2 * clip_score * near / (clip_score + near) if clip_score + near else 0.0,
            "EMScore": (coarse + fine) / 2,
            "EMScore-c": coarse,
            "EMScore-f": fine,
            "EMScoreRef": ((coarse + fine) / 2 + with_references) / 2,
        }


def unit(rows: np.ndarray) -> np.ndarray:
    return rows / np.linalg.norm(rows, axis=-1, keepdims=True)


@pytest.mark.parametrize("name", ENCODERS)
def test_scores_equal_a_plain_recomputation(towers: dict[str, Path], clips: Path, name: str) -> None:
    agreement = score_agreement(
        [CAPTIONS], REFERENCES, clips, str(towers[name]), sampling=SAMPLING, device="cpu", workers=1
    )
    plain = Plain(towers[name])
    assert not agreement.errors and list(agreement.systems[0]) == list(CAPTIONS)
    for video, caption in CAPTIONS.items():
        expected = plain.scores(caption, REFERENCES[video], clips / f"{video}.mp4")
        assert agreement.systems[0][video] == pytest.approx(expected, abs=2e-6), video
    assert agreement.num_shortened == 1
    assert agreement.corpus(0)["EMScore"] == pytest.approx(
        np.mean([row["EMScore"] for row in agreement.systems[0].values()])
    )


@pytest.mark.parametrize("name", ENCODERS)
def test_embeddings_do_not_depend_on_the_batch(towers: dict[str, Path], name: str) -> None:
    encoder = load_encoder(str(towers[name]))
    texts = [*CAPTIONS.values(), "a dog", "", *(text for texts in REFERENCES.values() for text in texts)]
    together = encoder.embed(texts)
    for text, embedding in zip(texts, together, strict=True):
        (alone,) = encoder.embed([text])
        np.testing.assert_array_equal(alone.sentence, embedding.sentence)
        np.testing.assert_array_equal(alone.tokens, embedding.tokens)
    frames = np.random.default_rng(0).integers(0, 256, (9, 48, 64, 3), dtype=np.uint8)
    np.testing.assert_array_equal(encoder.images(frames)[4:5], encoder.images(frames[4:5]))


def write_json(path: Path, value: Any) -> Path:
    path.write_text(json.dumps(value))
    return path


def test_command_reports_missing_and_broken_videos(
    capvid: Run, towers: dict[str, Path], clips: Path, tmp_path: Path
) -> None:
    folder = tmp_path / "clips"
    folder.mkdir()
    (folder / "v0.mp4").symlink_to(clips / "v0.mp4")
    (folder / "v1.mp4").write_text("not a video, but text long enough for its format to be probed\n" * 20)
    captions = write_json(tmp_path / "captions.json", CAPTIONS)
    others = write_json(tmp_path / "others.json", {**CAPTIONS, "v0": "a dog is in the field"})
    references = write_json(tmp_path / "references.json", REFERENCES)
    options = ["--videos", folder, "--encoder", towers["clip"], "--sampling", SAMPLING, "--metrics", "bleu"]
    table = tmp_path / "scores.csv"
    code, out, err = capvid("score", captions, references, *options, "--format=json", "--per-video", table)
    assert code == 0
    notes = [line for line in err.splitlines() if "has no CLIPScore" in line]
    assert [line.split()[1] for line in notes] == ["v2", "v1"]
    record = json.loads(out)["agreement"]
    assert record["videos"] == 1 and set(record["failed"]) == {"v1", "v2"}
    expected = score_agreement(
        [CAPTIONS], REFERENCES, folder, str(towers["clip"]), sampling=SAMPLING, device="cpu"
    ).corpus(0)
    assert {name: record["scores"][0][name] for name in expected} == pytest.approx(expected)
    assert (
        table.read_text()
        .splitlines()[0]
        .endswith("CLIPScore,RefCLIPScore,EMScore,EMScore-c,EMScore-f,EMScoreRef")
    )

    code, out, err = capvid("score", captions, references, *options, "--compare", others)
    assert code == 0 and "CLIPScore" in out
    rows = [line.split() for line in out.splitlines() if line.startswith(("A ", "B "))]
    assert rows[-2][0] == "A" and rows[-1][0] == "B" and rows[-2] != rows[-1]


def test_long_captions_are_said(capvid: Run, towers: dict[str, Path], clips: Path, tmp_path: Path) -> None:
    captions = write_json(tmp_path / "captions.json", CAPTIONS)
    references = write_json(tmp_path / "references.json", REFERENCES)
    code, _, err = capvid(
        *("score", captions, references, "--videos", clips, "--encoder", towers["siglip"]),
        *("--metrics", "bleu"),
    )
    assert code == 0 and "captions cut to 12 tokens, the maximum of " in err


def test_an_empty_caption_scores_nothing(towers: dict[str, Path], clips: Path) -> None:
    agreement = score_agreement([{}], REFERENCES, clips, str(towers["clip"]), device="cpu", workers=1)
    assert set(agreement.corpus(0).values()) == {0.0}


def test_errors(towers: dict[str, Path], clips: Path, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="unknown image-text encoder 'clpi'"):
        load_encoder("clpi")
    with pytest.raises(CheckpointError, match="no image-text encoder"):
        load_encoder(str(tmp_path))
    with pytest.raises(DataError, match=r"no video can be scored: .*the folder has no such video"):
        score_agreement([{"x": "a"}], {"x": ["a"]}, clips, str(towers["clip"]), device="cpu")
    damaged = tmp_path / "damaged"
    ENCODERS["clip"](damaged)
    (damaged / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="damaged or incomplete"):
        load_encoder(str(damaged))


LOAD = """
import sys
from capvid.errors import CapvidError
from capvid.vlm.image_text import load_encoder
try:
    encoder = load_encoder(sys.argv[1])
    print(encoder.name, encoder.embed(["a dog is running"])[0].sentence.sum().round(6))
except CapvidError as error:
    print(error)
"""


def test_encoder_from_the_hub_is_pinned_and_works_offline(towers: dict[str, Path], tmp_path: Path) -> None:
    models = tmp_path / "models.toml"
    models.write_text('[encoders.tiny]\nsource = "hub:anna/tiny"\n')
    hub = FakeHub()

    def load(endpoint: str, *, offline: bool = False) -> str:
        env = environment(tmp_path / "hf", endpoint, offline=offline) | {"CAPVID_MODELS": str(models)}
        return str(forked.run(LOAD, ["tiny"], env=env).stdout)

    try:
        assert "anna/tiny at main: config.json is not in the cache" in load(hub.url, offline=True)
        for path in towers["clip"].iterdir():
            hub.put(path.read_bytes(), path.name, repository="anna/tiny")
        first = load(hub.url)
        assert first.startswith(f"tiny@{COMMIT[:12]} ")
        hub.main = "b" * 40  # a later commit is not taken
        assert load(hub.url) == first
    finally:
        hub.close()
    assert load(NOWHERE) == first and load(NOWHERE, offline=True) == first
    expected = load_encoder(str(towers["clip"])).embed(["a dog is running"])[0].sentence.sum().round(6)
    assert float(first.split()[1]) == expected

"""A new captioner takes one short module in the package, and recipes can train it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import capvid.captioners
from capvid.captioners.base import CAPTIONERS
from capvid.captioners.checkpoint import load_checkpoint
from capvid.datasets.dataset import CaptionedVideo
from capvid.errors import UsageError
from capvid.features.feature_store import FeatureStore
from capvid.training.recipe import load_recipe
from capvid.training.trainer import Trainer

MODULE = (Path(__file__).parents[1] / "support" / "plugins" / "mean_word.py").read_text()
RECIPE = """
captioner = "mean-word"
model = { width = 24 }
data = { min_count = 1 }
training = { epochs = 2, batch_size = 4, precision = "fp32" }
"""


class NullReporter:
    def __getattr__(self, name: str):
        return lambda *values, **named: None


def test_new_captioner_takes_one_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert MODULE.count("\n") <= 40
    known = set(CAPTIONERS)
    monkeypatch.setattr(CAPTIONERS, "_plugins", dict(CAPTIONERS))
    monkeypatch.setattr(CAPTIONERS, "_discovered", False)
    monkeypatch.setattr(capvid.captioners, "__path__", [*capvid.captioners.__path__, str(tmp_path)])
    (tmp_path / "mean_word.py").write_text(MODULE)
    (tmp_path / "toy.toml").write_text(RECIPE)
    captions = {"a": "a dog runs", "b": "a cat sleeps", "c": "a man sings"}
    features = {f"{split}{name}": torch.randn(3, 5) for name in captions for split in ("train", "val")}
    save_file(features, tmp_path / "features.safetensors")
    Trainer(
        load_recipe(str(tmp_path / "toy.toml")),
        videos=[CaptionedVideo(video, video[:-1], (captions[video[-1]],)) for video in features],
        store=FeatureStore([tmp_path / "features.safetensors"]),
        folder=tmp_path / "run",
        device=torch.device("cpu"),
        reporter=NullReporter(),
    ).run()
    checkpoint = load_checkpoint(tmp_path / "run")
    assert (checkpoint.name, checkpoint.captioner.config.width) == ("mean-word", 24)
    assert set(CAPTIONERS) == known | {"mean-word"}
    sys.modules.pop("capvid.captioners.mean_word")


def test_similar_name_is_suggested() -> None:
    with pytest.raises(UsageError, match="dense_lstm: no such captioner; did you mean dense-lstm"):
        CAPTIONERS["dense_lstm"]


def test_only_the_named_captioner_is_imported() -> None:
    code = """
import sys
from capvid.captioners.base import CAPTIONERS
assert CAPTIONERS["m3"].name == "m3"
print(*(name for name in sys.modules if name.startswith("capvid.captioners.")))
"""
    names = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert sorted(name.rpartition(".")[2] for name in names.split()) == ["base", "layers", "m3"]


@pytest.mark.parametrize("name", sorted(CAPTIONERS))
def test_registered_names_match_the_captioners(name: str) -> None:
    assert CAPTIONERS[name].name == name

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from toy import write_video

from capvid.backbones import catalog
from capvid.backbones.backbone import load_backbone
from capvid.backbones.catalog import backbone_entry, backbones, canonical_backbone, captioners
from capvid.errors import UsageError
from capvid.features.feature_file import load_features


@pytest.mark.parametrize("name", sorted(backbones()))
def test_every_backbone_is_whole(name: str) -> None:
    entry = backbones()[name]
    assert entry.default_layer in entry.layers
    assert entry.licence and entry.origin and entry.description
    hub, torchvision = r"hub:[\w.-]+/[\w.-]+(@[0-9a-f]{40})?", r"torchvision:\w+\.\w+"
    web = r"https://[\w./-]+"
    assert re.fullmatch(rf"none|(file|bundled):[^/]+\.safetensors|{hub}|{torchvision}|{web}", entry.source)
    assert bool(entry.urls) == entry.source.startswith("https:")
    assert entry.source == "none" or entry.file.endswith((".safetensors", ".pth"))
    assert entry.file.endswith(".pth") == entry.source.startswith("torchvision:")
    assert entry.sha256 is None or re.fullmatch("[0-9a-f]{64}", entry.sha256)
    assert entry.sha256 or not entry.source.startswith("bundled:")
    assert entry.preprocess.order in ("RGB", "BGR")
    assert entry.preprocess.crop <= entry.preprocess.resize


def test_the_papers_features_are_there() -> None:
    widths = {
        ("googlenet", "pool5/7x7_s1"): (None, 1024),
        ("vgg16", "fc7"): (None, 4096),
        ("vgg16", "conv5_3"): (196, 512),
        ("vgg16", "conv5_3/mean"): (None, 512),
        ("vgg19", "fc7"): (None, 4096),
        ("inception-v3", "pool3"): (None, 2048),
        ("resnet50", "pool5"): (None, 2048),
        ("resnet152", "pool5"): (None, 2048),
        ("resnet200d", "pool5"): (None, 2048),
        ("c3d", "fc6"): (None, 4096),
        ("clip-vit-b32", "image_embeds"): (None, 512),
        ("clip-vit-l14", "image_embeds"): (None, 768),
        ("raft-small", "flow"): (49, 3),
    }
    for (name, layer), size in widths.items():
        found = backbones()[name].layers[layer]
        assert (found.locations, found.width) == size


@pytest.mark.parametrize("name", [entry.name for entry in backbones().values() if entry.kind == "timm"])
def test_preprocessing_is_that_of_timms_own_configuration(name: str) -> None:
    from timm.models import get_pretrained_cfg

    entry = backbones()[name]
    (alias,) = entry.aliases
    known, how = get_pretrained_cfg(alias.removeprefix("timm/")), entry.preprocess
    assert entry.source.startswith(f"hub:{known.hf_hub_id}") and known.hf_hub_id == alias
    assert entry.licence.partition(" ")[0] == known.license
    assert how.crop == known.input_size[1] and how.resize == int(known.input_size[1] / known.crop_pct)
    assert (how.interpolation, known.crop_mode) == (known.interpolation, "center")
    assert (how.mean, how.std, how.scale, how.order) == (known.mean, known.std, 255, "RGB")


def test_names_are_unique() -> None:
    names = [name for entry in backbones().values() for name in (entry.name, *entry.aliases)]
    assert len(names) == len(set(names))


def test_captioners_name_their_papers() -> None:
    assert {"soft-attention", "m3"} <= set(captioners())
    assert all(entry.paper and entry.description and entry.file for entry in captioners().values())


def test_alias_and_layers() -> None:
    entry = backbone_entry("bvlc_googlenet")
    assert entry is backbones()["googlenet"]
    assert (entry.layers["inception_5b/output"].locations, entry.layers["pool5/7x7_s1"].width) == (49, 1024)
    assert entry.default_layer == "pool5/7x7_s1"
    with pytest.raises(UsageError, match=r"no layer 'fc7'; use one of pool5/7x7_s1, inception_5b/output"):
        load_backbone("bvlc_googlenet", layer="fc7")


def test_names_outside_the_registry() -> None:
    assert canonical_backbone("x3d-xs") == "x3d-xs"
    assert canonical_backbone(None) is None
    with pytest.raises(UsageError, match=r"unknown backbone 'abacus'; use one of googlenet, resnet50"):
        backbone_entry("abacus")
    with pytest.raises(UsageError, match=r"unknown backbone 'vgg'; did you mean vgg16 or vgg19\?"):
        backbone_entry("vgg")


def test_preprocessing_in_words() -> None:
    words = [backbone_entry(name).describe_input() for name in ("googlenet", "resnet50")]
    assert words == [
        "short side 256 bilinear, centre 224, BGR minus (104, 117, 123)",
        "short side 256 bilinear, centre 224, RGB / 255 minus (0.485, 0.456, 0.406), "
        "over (0.229, 0.224, 0.225)",
    ]


def test_the_registry_imports_no_deep_learning_library() -> None:
    code = (
        "import sys; from capvid.backbones import catalog; catalog.backbones(); "
        "from capvid.features import feature_file, feature_store; "
        "print([m for m in ('torch', 'timm', 'decord', 'huggingface_hub') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


TOY = (Path(__file__).parents[1] / "support" / "plugins" / "quarters.py").read_text()


def test_a_backbone_is_added_by_declaring_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(catalog, "_DECLARED", {})
    monkeypatch.setattr(catalog.NETWORKS, "_plugins", dict(catalog.NETWORKS.items()))
    exec(compile(TOY, "quarters.py", "exec"), {"__name__": "quarters"})
    entry = backbone_entry("quarters")
    assert (entry.kind, entry.source, entry.default_layer) == ("quarters", "none", "colours")
    assert entry.description == "Mean colour of each quarter of a frame."
    frames = np.random.default_rng(0).integers(0, 256, (3, 8, 8, 3), np.uint8)
    features = load_backbone("quarters")(frames)
    expected = frames.reshape(3, 2, 4, 2, 4, 3).mean((2, 4)).transpose(0, 3, 1, 2).reshape(3, 12) / 255
    np.testing.assert_allclose(features, expected, rtol=1e-5)
    with pytest.raises(ValueError, match="network quarters is registered twice"):
        exec(compile(TOY, "quarters.py", "exec"), {"__name__": "quarters"})


def test_one_new_file_is_enough(tmp_path: Path) -> None:
    """The file is found in the package, at first without torch, and its features can be extracted."""
    (tmp_path / "quarters.py").write_text(TOY)
    video = write_video(tmp_path / "v.mp4", seed=1)
    code = (
        "import sys, capvid.backbones; capvid.backbones.__path__.append(sys.argv[1])\n"
        "from capvid.backbones.catalog import backbones; assert 'quarters' in backbones()\n"
        "assert 'torch' not in sys.modules\n"
        "from capvid.cli.app import main\n"
        "sys.exit(main(['extract', sys.argv[2], '--backbone', 'quarters', '-o', sys.argv[3]]))"
    )
    command = [sys.executable, "-c", code, str(tmp_path), str(video), str(tmp_path / "out")]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    features = load_features(tmp_path / "out" / "v.safetensors")
    assert features.streams[0].shape[1:] == (12,) and features.header.streams[0].backbone == "quarters"

from __future__ import annotations

import io
import os
import pickle
import tarfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from cached_shapes import cached_backbone_shapes
from safetensors.torch import load_file, save_file
from torch import Tensor

from capvid.backbones.backbone import load_backbone
from capvid.backbones.catalog import backbone_entry, build_network
from capvid.backbones.conversion import convert
from capvid.errors import UsageError, WeightsError
from capvid.utils.files import sha256_file
from capvid.utils.tensor_files import read_tensors

Tensors = dict[str, Tensor]
__all__ = ["cached_backbone_shapes"]


def tensors_of(name: str) -> Tensors:
    """All tensors of a backbone as they are published: any numbers, of which the file holds only one each."""
    entry = backbone_entry(name)
    found: Tensors = {}
    for layer in entry.layers:
        for number, (key, tensor) in enumerate(build_network(entry, layer).state_dict().items()):
            value = torch.tensor(number if not tensor.is_floating_point() else number / 8, dtype=tensor.dtype)
            found[key] = value.expand(tensor.shape)
    return found


def renamed(tensors: Tensors, spell: Callable[[str], str]) -> Tensors:
    return {spell(name): tensor for name, tensor in tensors.items()}


def saved(content: object, path: Path) -> Path:
    torch.save(content, path)
    return path


def layer_and_blob(name: str) -> tuple[str, str]:
    layer, _, blob = name.rpartition(".")
    return layer, blob


C3D_SPELLINGS: dict[str, Callable[[str], str]] = {
    "ours": str,
    "conv1": lambda name: name.replace("conv1a", "conv1").replace("conv2a", "conv2"),
    "Caffe": lambda name: name.replace("fc6.", "fc6-1.").replace("fc7.", "fc7-1."),
    "slashes": lambda name: name.replace("fc6.", "fc6_1.").replace(".", "/"),
    "wrapped": lambda name: "module.backbone." + name.replace("a.", "a.conv.").replace("b.", "b.conv."),
    "blobs": lambda name: name.replace(".weight", "_w").replace(".bias", "_b"),
}


@pytest.mark.parametrize("spelling", C3D_SPELLINGS)
def test_c3d_by_many_names(tmp_path: Path, spelling: str) -> None:
    tensors = tensors_of("c3d")
    given = renamed(tensors, C3D_SPELLINGS[spelling])
    given["fc8.weight"] = torch.zeros(1).expand(487, 4096)
    path = saved(OrderedDict(given), tmp_path / "c3d.pickle")
    for backbone in ("c3d", None):
        found = convert(path, backbone=backbone)
        assert found.entry.name == "c3d"
        assert found.left_out == ("fc8.weight",)
        assert found.tensors.keys() == tensors.keys()
        for name, tensor in found.tensors.items():
            assert tensor.shape == tensors[name].shape and tensor.dtype == torch.float32
            assert tensor.flatten()[0] == tensors[name].flatten()[0]


@pytest.mark.parametrize("nest", ["state_dict", "model", "model_state", "model_state_dict"])
def test_tensors_beside_other_things(tmp_path: Path, nest: str) -> None:
    content = {"epoch": 3, "loss": torch.tensor(0.5), nest: renamed(tensors_of("r3d-18"), "module.{}".format)}
    path = saved(content, tmp_path / "model_best.pth.tar")
    found = convert(path)
    assert found.entry.name == "r3d-18" and found.left_out == ()


@pytest.mark.slow
@pytest.mark.parametrize(
    "name",
    [
        "googlenet",
        "resnet50",
        "resnet152",
        "vgg16",
        "vgg19",
        "inception-v3",
        "efficientnet-lite2",
        "x3d-xs",
        "mc3-18",
        "s3d",
        "siglip2-base",
        "pe-core-tiny",
        "dinov3-small",
    ],
)
def test_a_backbone_is_recognised_by_its_names(tmp_path: Path, name: str) -> None:
    path = saved(tensors_of(name) | {"other.weight": torch.zeros(2, 2)}, tmp_path / "some.pt")
    found = convert(path)
    assert found.entry.name == name


@pytest.mark.slow
@pytest.mark.parametrize("name", ["clip-vit-b32", "clip-vit-l14", "videomae-base", "vjepa2-large"])
def test_backbones_of_transformers(tmp_path: Path, name: str) -> None:
    tensors = tensors_of(name) | {"decoder.norm.weight": torch.zeros(4)}
    assert convert(saved(tensors, tmp_path / "pytorch_model.bin")).entry.name == name


def test_caffes_slashes(tmp_path: Path) -> None:
    tensors = tensors_of("googlenet")
    entry = backbone_entry("googlenet")

    def spell(name: str) -> str:
        layer, blob = layer_and_blob(name)
        for part in ("inception_3a", "inception_4e", "conv1", "loss3"):
            layer = layer.replace(f"{part}_", f"{part}/", 1)
        return f"{layer}/{blob}s" if blob == "weight" else f"{layer}/{blob}es"

    found = convert(saved(renamed(tensors, spell), tmp_path / "bvlc.pt"), backbone="bvlc_googlenet")
    assert found.entry.name == entry.name and found.tensors.keys() == tensors.keys()


def test_vgg_as_torchvision_has_it(tmp_path: Path) -> None:
    from torchvision.models import vgg16

    with torch.device("meta"):
        shapes = {name: tensor.shape for name, tensor in vgg16().state_dict().items()}
    tensors = {name: torch.tensor(1.0).expand(shape) for name, shape in shapes.items()}
    found = convert(saved(tensors, tmp_path / "vgg16-397923af.pth"))
    assert found.entry.name == "vgg16"
    assert found.tensors["pre_logits.fc1.weight"].shape == (4096, 512, 7, 7)
    assert found.left_out == ("classifier.6.bias", "classifier.6.weight")


@torch.inference_mode()
def test_efficientnet_lite2_as_lukemelas_has_it(tmp_path: Path) -> None:
    """His package numbers all blocks through; what is converted computes what timm's network does."""
    torch.manual_seed(0)
    import timm

    network = timm.create_model("tf_efficientnet_lite2")
    for module in network.modules():
        if isinstance(module, torch.nn.BatchNorm2d):
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.6, 1.6)
    names = ["_conv_stem.weight", *batch_norm("_bn0")]
    for block in range(21):
        parts = ["_depthwise_conv", "_bn1", "_project_conv", "_bn2"]
        for part in parts if block == 0 else ["_expand_conv", "_bn0", *parts]:
            name = f"_blocks.{block}.{part}"
            names += batch_norm(name) if "bn" in part else [f"{name}.weight"]
    names += ["_conv_head.weight", *batch_norm("_bn1"), "_fc.weight", "_fc.bias"]
    path = saved(dict(zip(names, network.state_dict().values(), strict=True)), tmp_path / "lite2.pth")
    found = convert(path, backbone="efficientnet-lite2")
    assert found.left_out == ("_fc.bias", "_fc.weight")
    found.save(tmp_path / "efficientnet-lite2.safetensors")
    backbone = load_backbone("efficientnet-lite2", search=[tmp_path])
    pictures = torch.randn(1, 3, 64, 64)
    network.reset_classifier(0)
    torch.testing.assert_close(backbone.module(pictures), network.eval()(pictures), atol=1e-5, rtol=1e-5)
    assert convert(path).entry.name == "efficientnet-lite2"


def batch_norm(name: str) -> list[str]:
    kinds = ("weight", "bias", "running_mean", "running_var", "num_batches_tracked")
    return [f"{name}.{kind}" for kind in kinds]


def test_old_files_do_not_count_batches(tmp_path: Path) -> None:
    tensors = {n: t for n, t in tensors_of("resnet50").items() if not n.endswith("num_batches_tracked")}
    found = convert(saved(renamed(tensors, "net.{}".format), tmp_path / "old.pth"), backbone="resnet50")
    assert found.tensors.keys() == tensors_of("resnet50").keys()


def test_what_does_not_fit_is_said(tmp_path: Path) -> None:
    tensors = tensors_of("c3d")
    del tensors["conv3b.bias"]
    tensors["fc6.weight"] = torch.zeros(1).expand(4096, 4608)
    path = saved(tensors, tmp_path / "c3d.pth")
    with pytest.raises(WeightsError) as caught:
        convert(path, backbone="c3d")
    assert "1 of 20 tensors are missing: conv3b.bias" in str(caught.value)
    assert "fc6.weight is 4096 x 4608, not 4096 x 8192" in str(caught.value)
    with pytest.raises(UsageError, match="fits no backbone; name the backbone with --as"):
        convert(path)


def test_a_network_with_batch_normalisation_is_no_c3d(tmp_path: Path) -> None:
    tensors = tensors_of("c3d") | {"bn1.running_mean": torch.zeros(64)}
    with pytest.raises(WeightsError, match="batch normalisation, which c3d does not have"):
        convert(saved(tensors, tmp_path / "c3d.pth"), backbone="c3d")


class Malicious:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, ...]:
        return os.system, (f"touch {self.path}",)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["torch", "pickle", "old torch"])
def test_a_malicious_pickle_is_never_run(tmp_path: Path, how: str) -> None:
    trace, path = tmp_path / "run", tmp_path / "weights.pth"
    content = {"state_dict": tensors_of("capvid-small"), "hook": Malicious(trace)}
    if how == "pickle":
        path.write_bytes(pickle.dumps({"hook": Malicious(trace)}, protocol=2))
    else:
        torch.save(content, path, _use_new_zipfile_serialization=how == "torch")
    with pytest.raises(WeightsError, match="holds more than tensors") as caught:
        convert(path)
    assert "system" in str(caught.value)
    assert not trace.exists()
    with pytest.raises(WeightsError):
        load_backbone("s3d", weights=path)
    assert not trace.exists()
    torch.load(path, weights_only=False) if how != "pickle" else pickle.loads(path.read_bytes())
    assert trace.exists()  # so it would have been


def test_files_that_are_no_checkpoints(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match="no such file"):
        convert(tmp_path / "gone.pth")
    (tmp_path / "text.pth").write_text("not found")
    with pytest.raises(WeightsError, match=r"text\.pth"):
        convert(tmp_path / "text.pth")
    (tmp_path / "empty.pth").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"empty\.pth: not a readable checkpoint"):
        convert(tmp_path / "empty.pth")
    with tarfile.open(tmp_path / "a.pth.tar", "w") as archive:
        archive.addfile(tarfile.TarInfo("x"), io.BytesIO())
    with pytest.raises(WeightsError, match=r"a\.pth\.tar"):
        convert(tmp_path / "a.pth.tar")
    with pytest.raises(WeightsError, match="there are no tensors in it"):
        convert(saved({"epoch": 3}, tmp_path / "none.pth"))
    cut = tmp_path / "cut.pth"
    torch.save({"a": torch.zeros(1000)}, cut)
    cut.write_bytes(cut.read_bytes()[:2000])
    with pytest.raises(WeightsError, match=r"cut\.pth: not a readable checkpoint"):
        convert(cut)
    with pytest.raises(UsageError, match="colour-grid needs no weights"):
        convert(cut, backbone="colour-grid")


@pytest.mark.slow
def test_a_converted_file_is_loaded_and_the_same_again(tmp_path: Path) -> None:
    torch.manual_seed(0)
    entry = backbone_entry("mc3-18")
    module = build_network(entry, "avgpool")
    for name, tensor in module.state_dict().items():
        if tensor.is_floating_point():
            tensor.normal_(std=0.05) if not name.endswith("var") else tensor.fill_(1)
        else:
            tensor.fill_(7)
    halves = {f"module.{n}": t.half() if t.is_floating_point() else t for n, t in module.state_dict().items()}
    found = convert(saved(halves, tmp_path / "mc3.pth"))
    out = tmp_path / "weights" / "mc3-18.safetensors"
    digest = found.save(out)
    assert digest == sha256_file(out) == found.save(tmp_path / "again.safetensors")
    written = load_file(out)
    for name, tensor in halves.items():
        assert torch.equal(written[name.removeprefix("module.")], tensor.to(written[name[7:]].dtype))
    backbone = load_backbone("mc3-18", weights=out)
    assert backbone.header.weights_sha256 == digest
    assert load_backbone("mc3-18", search=[out.parent]).header.weights_sha256 == digest
    save_file({"a": torch.zeros(1)}, tmp_path / "a.safetensors")
    assert read_tensors(tmp_path / "a.safetensors").keys() == {"a"}


def test_a_known_digest_is_still_asked_for(tmp_path: Path) -> None:
    out = tmp_path / "bvlc_googlenet.safetensors"
    convert(saved(tensors_of("googlenet"), tmp_path / "googlenet.pt")).save(out)
    with pytest.raises(WeightsError, match=r"not the weights of googlenet \(sha256 .*expected c058c6d5c42e"):
        load_backbone("googlenet", weights=out)

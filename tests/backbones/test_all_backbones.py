"""Every backbone of the registry with random weights: built, run, cut off at each of its layers."""

from __future__ import annotations

import json
import subprocess
import sys

import numpy as np
import pytest
import torch
from encoders import shallow
from fast_paths import is_fast
from torch import Tensor, nn

from capvid.backbones.backbone import Backbone
from capvid.backbones.catalog import BackboneEntry, StreamHeader, backbones, build_network

SHIPPED = json.loads(
    subprocess.run(
        [
            sys.executable,
            "-c",
            "import json, os; os.environ.pop('CAPVID_MODELS', None)\n"
            "from capvid.backbones.catalog import backbones\n"
            "print(json.dumps([[e.name, layer] for e in backbones().values() for layer in e.layers]))",
        ],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
)


def with_random_weights(module: nn.Module) -> nn.Module:
    """Weights with the variances of He et al. 2015, cheaply: the same 65,537 numbers again and again."""
    noise = torch.randn(65_537, generator=torch.Generator().manual_seed(0))
    for name, tensor in module.state_dict().items():
        if not tensor.is_floating_point():
            tensor.zero_()
        elif name.endswith("running_var"):
            tensor.fill_(1)
        elif tensor.ndim > 1:
            values = noise.repeat(tensor.numel() // len(noise) + 1)[: tensor.numel()]
            tensor.copy_(values.view(tensor.shape)).mul_((2 / tensor[0].numel()) ** 0.5)
        else:
            tensor.fill_(1.0 if "norm" in name or name.endswith((".weight", "gamma_1", "gamma_2")) else 0.0)
    return module.eval().requires_grad_(False)


class SingleFrameBackbone(Backbone):
    """A backbone whose batches have one frame, instead of being padded with zeros as on a CPU."""

    def batch_length(self, batch_size: int) -> int:
        return 1


def as_backbone(entry: BackboneEntry, layer: str, module: nn.Module) -> Backbone:
    size = entry.layers[layer]
    header = StreamHeader(
        backbone=entry.name,
        layer=layer,
        width=size.width,
        locations=size.locations,
        weights_sha256=None,
        preprocess=entry.describe_input(),
    )
    return SingleFrameBackbone(
        entry=entry, layer=layer, module=module, header=header, device=torch.device("cpu")
    )


def network_input(entry: BackboneEntry) -> Tensor:
    """A picture (1, 3, h, w) or a clip (1, 3, C, h, w), smoother than noise."""
    height, width = entry.preprocess.size or (entry.preprocess.crop,) * 2
    frames = entry.clip.frames if entry.clip else 1
    coarse = torch.randn(3, frames, 8, 8, generator=torch.Generator().manual_seed(1))
    images = nn.functional.interpolate(coarse, size=(height, width), mode="bilinear")  # (3, C, h, w)
    return images.unsqueeze(0) if entry.clip else images.transpose(0, 1)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "layer"), SHIPPED)
@torch.inference_mode()
def test_every_layer(name: str, layer: str) -> None:
    entry = shallow(backbones()[name], 2)
    size = entry.layers[layer]
    module = with_random_weights(build_network(entry, layer))
    frames = np.random.default_rng(0).integers(0, 256, (1, 48, 64, 3), dtype=np.uint8)
    backbone = as_backbone(entry, layer, module)
    inputs: list[Tensor] = []
    hook = module.register_forward_pre_hook(lambda _, arguments: inputs.extend(arguments))
    features = backbone(frames)
    hook.remove()
    assert features.dtype == np.float32
    assert features.shape == (1, *([size.locations] if size.locations else []), size.width)
    assert np.isfinite(features).all()
    if layer != entry.default_layer:
        return
    images = torch.cat([*inputs, network_input(entry)])
    together = module(images)
    assert together.dtype == torch.float32 and together.isfinite().all()
    scale = together.abs().max()
    alone = torch.from_numpy(features[0])
    torch.testing.assert_close(alone, together[0], rtol=1e-3, atol=1e-3 * float(scale))
    assert (together[0] - together[1]).abs().max() > 1e-3 * scale
    if entry.half is not False and is_fast("bf16"):
        low = module.to(torch.bfloat16)(images[1:].to(torch.bfloat16))
        assert low.dtype == torch.bfloat16
        alike = torch.cosine_similarity(low.float().flatten(), together[1].flatten(), dim=0)
        assert alike > 0.98


@pytest.mark.slow
@torch.inference_mode()
def test_the_mean_of_conv5_3_is_that_of_its_places() -> None:
    entry = backbones()["vgg16"]
    maps, mean = (with_random_weights(build_network(entry, layer)) for layer in ("conv5_3", "conv5_3/mean"))
    assert maps.state_dict().keys() == mean.state_dict().keys()
    images = network_input(entry)
    places = maps(images)[0]  # (196, 512)
    assert (places >= 0).all()  # after the ReLU
    expected = torch.stack([sum(places[:, d]) / 196 for d in range(0, 512, 37)])
    torch.testing.assert_close(mean(images)[0][::37], expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted({name for name, _ in SHIPPED}))
def test_layers_without_weights_of_their_own_need_none_of_what_lies_beyond(name: str) -> None:
    """The tensors of every layer are among those of the last: one file of weights serves all."""
    entry = backbones()[name]
    shapes: dict[str, tuple[int, ...]] = {}
    for layer in entry.layers:
        for key, tensor in build_network(entry, layer).state_dict().items():
            assert shapes.setdefault(key, tuple(tensor.shape)) == tuple(tensor.shape)
    assert bool(shapes) == (entry.source != "none")

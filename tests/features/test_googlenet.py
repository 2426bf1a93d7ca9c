from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from capvid.features.googlenet import LAYERS, GoogLeNet, local_response_norm, max_pool


@pytest.mark.parametrize("channels", [3, 12])
def test_local_response_norm_is_caffes_formula(channels: int) -> None:
    x = np.random.default_rng(0).normal(0, 60, (2, channels, 3, 2))
    expected = np.empty_like(x)
    for n, c, h, w in np.ndindex(*x.shape):
        around = [x[n, i, h, w] for i in range(c - 2, c + 3) if 0 <= i < channels]
        expected[n, c, h, w] = x[n, c, h, w] / (1.0 + 1e-4 / 5 * sum(v * v for v in around)) ** 0.75
    given = torch.from_numpy(x.astype(np.float32))
    np.testing.assert_allclose(local_response_norm(given).numpy(), expected, rtol=2e-5)
    np.testing.assert_array_equal(given.numpy(), x.astype(np.float32))
    assert np.abs(expected / x).min() < 0.9


@pytest.mark.parametrize(
    ("side", "pooled"), [(112, 56), (114, 57), (57, 28), (56, 28), (28, 14), (14, 7), (7, 3)]
)
def test_max_pooling_rounds_sizes_up_as_caffe_does(side: int, pooled: int) -> None:
    x = torch.from_numpy(np.random.default_rng(side).normal(size=(1, 1, side, side)).astype(np.float32))
    found = max_pool(x)[0, 0].numpy()
    assert found.shape == (pooled, pooled)
    plane = x[0, 0].numpy()
    expected = [
        [plane[2 * i : 2 * i + 3, 2 * j : 2 * j + 3].max() for j in range(pooled)] for i in range(pooled)
    ]
    np.testing.assert_array_equal(found, np.array(expected))


def random_network() -> GoogLeNet:
    torch.manual_seed(0)
    network = GoogLeNet().eval()
    for parameter in network.parameters():
        if parameter.ndim > 1:  # so that the picture, and not the biases, decides the output
            torch.nn.init.kaiming_normal_(parameter)
    return network


@torch.inference_mode()
def test_layers_follow_from_each_other() -> None:
    network = random_network()
    images = torch.randn(2, 3, 224, 224) * 50
    found = network(images, LAYERS)
    maps, pooled, logits = (found[layer] for layer in LAYERS)
    assert maps.shape == (2, 49, 1024)
    torch.testing.assert_close(maps.mean(1), pooled)
    classifier = network.loss3_classifier
    torch.testing.assert_close(pooled @ classifier.weight.T + classifier.bias, logits)
    assert list(network(images[:1])) == ["pool5/7x7_s1"]
    assert pooled.std() > 0


@torch.inference_mode()
def test_places_of_the_map_go_row_by_row() -> None:
    """What changes in the picture's upper right corner changes that corner of the map most."""
    network = random_network()
    images = torch.zeros(2, 3, 224, 224)
    images[1, :, :32, -32:] = 100.0
    maps = network(images, ("inception_5b/output",))["inception_5b/output"]
    change = (maps[1] - maps[0]).abs().sum(1).view(7, 7)
    assert change[:3, 4:].sum() > 2 * change[4:, :3].sum()
    assert change[:3, 4:].sum() > 2 * change[4:, 4:].sum()


@torch.inference_mode()
@pytest.mark.shared
def test_the_numbers_are_caffes(shared_data: Path) -> None:
    folder = shared_data / "data" / "weights"
    reference = load_file(folder / "googlenet_reference.safetensors")
    network = GoogLeNet().eval()
    network.load_state_dict(load_file(folder / "bvlc_googlenet.safetensors"))
    found = network(reference["input_bgr_minus_mean"], LAYERS)
    torch.testing.assert_close(found["pool5/7x7_s1"], reference["pool5"], rtol=0, atol=1e-4)
    torch.testing.assert_close(found["loss3/classifier"], reference["logits"], rtol=0, atol=1e-4)
    torch.testing.assert_close(found["loss3/classifier"].softmax(1), reference["prob"], rtol=0, atol=1e-5)

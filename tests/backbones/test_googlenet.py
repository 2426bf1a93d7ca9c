from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from fast_paths import where_fast
from safetensors.torch import load_file

from capvid.backbones.googlenet import LAYERS, GoogLeNet, local_response_norm, max_pool

TYPES = (torch.float32, torch.float16, torch.bfloat16)
HALVES = {torch.float16: 2e-3, torch.bfloat16: 2e-2}  # bounds on the relative error of a layer


def normalised(x: np.ndarray) -> np.ndarray:
    """Caffe's formula, element by element, for x (N, C, H, W)."""
    expected = np.empty_like(x)
    for n, c, h, w in np.ndindex(*x.shape):
        around = [x[n, i, h, w] for i in range(c - 2, c + 3) if 0 <= i < x.shape[1]]
        expected[n, c, h, w] = x[n, c, h, w] / (1.0 + 1e-4 / 5 * sum(v * v for v in around)) ** 0.75
    return expected


@pytest.mark.parametrize("channels", [3, 12])
def test_local_response_norm_is_caffes_formula(channels: int) -> None:
    x = np.random.default_rng(0).normal(0, 60, (2, channels, 3, 2))
    expected = normalised(x)
    given = torch.from_numpy(x.astype(np.float32))
    np.testing.assert_allclose(local_response_norm(given).numpy(), expected, rtol=2e-5)
    assert np.abs(expected / x).min() < 0.9


@pytest.mark.parametrize("dtype", HALVES)
def test_squares_do_not_overflow_in_half_precision(dtype: torch.dtype) -> None:
    x = torch.from_numpy(np.random.default_rng(0).uniform(0, 3000, (2, 12, 3, 2))).to(dtype)
    assert x.max() ** 2 > torch.finfo(torch.float16).max
    found = local_response_norm(x)
    assert found.dtype == dtype
    expected = torch.from_numpy(normalised(x.double().numpy()))
    torch.testing.assert_close(found.double(), expected, rtol=torch.finfo(dtype).eps, atol=0)


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


@pytest.mark.parametrize("dtype", HALVES)
def test_maxima_made_positive_are_maxima_of_what_is_made_positive(dtype: torch.dtype) -> None:
    x = torch.randn(2, 4, 12, 9, generator=torch.Generator().manual_seed(0)).sub_(1.5).to(dtype)
    assert torch.equal(max_pool(x).relu(), max_pool(x.relu()))
    assert 0 < (max_pool(x).relu() == 0).float().mean() < 1


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
@pytest.mark.parametrize("dtype", map(where_fast, HALVES))
def test_half_precision_is_close(dtype: torch.dtype) -> None:
    network = random_network()
    network.conv1_7x7_s2.weight.mul_(4)  # activations before both normalisations in the hundreds
    network.conv2_3x3.weight.mul_(20)
    images = torch.randint(-120, 130, (2, 3, 224, 224), generator=torch.Generator().manual_seed(0)).float()
    assert max_pool(network.conv1_7x7_s2(images)).quantile(0.9) > 300
    expected = network(images, LAYERS)
    found = network.to(dtype)(images.to(dtype), LAYERS)
    for layer in LAYERS:
        assert found[layer].dtype == dtype
        error = (found[layer].float() - expected[layer]).norm() / expected[layer].norm()
        assert error < HALVES[dtype], layer


@pytest.mark.slow
@torch.inference_mode()
@pytest.mark.parametrize("dtype", map(where_fast, TYPES))
def test_result_does_not_depend_on_what_else_is_in_the_batch(dtype: torch.dtype) -> None:
    network = random_network().to(dtype)
    images = (torch.randn(5, 3, 224, 224, generator=torch.Generator().manual_seed(0)) * 50).to(dtype)
    found, turned = network(images[:4], LAYERS), network(images[[4, 0, 2, 1]], LAYERS)
    for layer in LAYERS:
        assert torch.equal(found[layer][[0, 2, 1]], turned[layer][1:])


def test_its_input_is_left_as_it_is_and_memory_order_changes_nothing() -> None:
    network = random_network()
    images = torch.randn(2, 3, 227, 227, generator=torch.Generator().manual_seed(0)) * 50
    kept = images.clone()
    found = network(images)["pool5/7x7_s1"]
    assert found.shape == (2, 1024)
    assert torch.equal(images, kept)
    arranged = images.contiguous(memory_format=torch.channels_last)
    assert torch.equal(network(arranged)["pool5/7x7_s1"], found)
    assert not found.requires_grad


def test_parameters_keep_caffes_names() -> None:
    names = set(random_network().state_dict())
    assert {"conv1_7x7_s2.weight", "inception_3a_5x5_reduce.bias", "loss3_classifier.weight"} < names
    assert len(names) == 2 * (3 + 9 * 6 + 1)


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


@torch.inference_mode()
@pytest.mark.shared
@pytest.mark.parametrize(
    ("dtype", "bound"), [where_fast(torch.float16, 2e-3), where_fast(torch.bfloat16, 1e-2)]
)
def test_half_precision_is_close_to_caffe(shared_data: Path, dtype: torch.dtype, bound: float) -> None:
    folder = shared_data / "data" / "weights"
    reference = load_file(folder / "googlenet_reference.safetensors")
    network = GoogLeNet().eval()
    network.load_state_dict(load_file(folder / "bvlc_googlenet.safetensors"))
    found = network.to(dtype)(reference["input_bgr_minus_mean"].to(dtype))["pool5/7x7_s1"].float()
    assert (found - reference["pool5"]).norm() < bound * reference["pool5"].norm()

"""Initial weights of distillation, views with their own targets, and depthwise convolutions in bfloat16."""

from __future__ import annotations

import io
import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from distillation import targets
from distillation.distiller import DistilInputs, make_distiller
from distillation.images import ImageSource, find_images, make_view, random_crop, view_crops
from distillation.student import DepthwiseConv, fast_depthwise, fold, measure, ridge
from distillation.targets import teacher_features
from distilling import CPU, Silent, StoppedError, Stopping, recipe, run, toy_inputs
from fast_paths import needs_bf16
from PIL import Image
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn import functional as F

from capvid.backbones.backbone import Backbone, load_backbone
from capvid.backbones.capvid_small import Student
from capvid.backbones.catalog import StreamHeader, backbone_entry, build_network
from capvid.backbones.preprocessing import prepare
from capvid.errors import TrainingError, UsageError, WeightsError

pytestmark = pytest.mark.slow


@pytest.fixture
def inputs(tmp_path: Path) -> DistilInputs:
    return toy_inputs(tmp_path)


def lite0(seed: int = 0) -> nn.Module:
    """Timm's EfficientNet-Lite0, padded alike on all sides, with random weights and statistics."""
    torch.manual_seed(seed)
    import timm

    network = timm.create_model("efficientnet_lite0", num_classes=0)
    for module in network.modules():
        if isinstance(module, nn.BatchNorm2d):
            nn.init.uniform_(module.weight, 0.7, 1.3)
            nn.init.uniform_(module.bias, -0.3, 0.3)
            module.running_mean.uniform_(-0.3, 0.3)
            module.running_var.uniform_(0.6, 1.6)
    return network.eval()


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with random weights of EfficientNet-Lite0."""
    folder = tmp_path_factory.mktemp("weights")
    save_file(lite0().state_dict(), folder / "efficientnet-lite0.safetensors")
    return folder


def student() -> Student:
    found = build_network(backbone_entry("capvid-small"), "embedding")
    assert isinstance(found, Student)
    return found


@torch.inference_mode()
def test_folded_weights_compute_what_timm_does_with_batch_normalisation() -> None:
    network, ours = lite0(), student()
    fold(network, ours)
    images = torch.randn(2, 3, 128, 176, generator=torch.Generator().manual_seed(1))
    embedding = network(images)
    assert float(embedding.std()) > 0.01
    torch.testing.assert_close(ours(images), embedding, atol=1e-4, rtol=1e-4)


def test_statistics_are_those_of_all_batches_together() -> None:
    network = nn.Sequential(nn.Conv2d(3, 4, 1, bias=False), nn.BatchNorm2d(4))
    batches = torch.randn(5, 6, 3, 7, 7, generator=torch.Generator().manual_seed(2)) * 3 + 1
    measure(network, batches)
    maps = [network[0](batch).detach() for batch in batches]
    mean = torch.stack([each.mean((0, 2, 3)) for each in maps]).mean(0)
    variance = torch.stack([each.transpose(0, 1).flatten(1).var(1) for each in maps]).mean(0)
    torch.testing.assert_close(network[1].running_mean, mean)
    torch.testing.assert_close(network[1].running_var, variance)
    assert not network.training


def test_ridge_regression_finds_a_linear_map_and_holds_back_from_noise() -> None:
    generator = torch.Generator().manual_seed(3)
    inputs, map_ = torch.randn(200, 60, generator=generator), torch.randn(60, 4, generator=generator)
    weight, bias = ridge(inputs, inputs @ map_ + 5)
    torch.testing.assert_close(weight, map_.T, atol=0.01, rtol=0.01)
    torch.testing.assert_close(bias, torch.full((4,), 5.0), atol=0.01, rtol=0.01)
    fresh, noise = torch.randn(500, 60, generator=generator), 30 * torch.randn(700, 4, generator=generator)
    weight, bias = ridge(inputs, inputs @ map_ + noise[:200])
    wanted = fresh @ map_ + noise[200:]
    least = torch.linalg.lstsq(inputs, inputs @ map_ + noise[:200]).solution
    ours, plain = F.mse_loss(fresh @ weight.T + bias, wanted), F.mse_loss(fresh @ least, wanted)
    assert ours < 0.9 * plain
    assert ours < 1.02 * wanted.square().mean()  # telling the mean


@pytest.mark.slow
def test_a_begun_student_tells_more_than_the_mean_before_it_learns(
    inputs: DistilInputs, tmp_path: Path, weights: Path
) -> None:
    still = {"epochs": 1, "learning_rate": 1e-9}
    begun = run(recipe(begin="efficientnet-lite0", **still), replace(inputs, weights=weights), tmp_path / "a")
    scratch = run(recipe(**still), inputs, tmp_path / "b")
    assert begun[0]["val_colour-grid"] < 0.8 < scratch[0]["val_colour-grid"]
    assert json.loads((tmp_path / "a" / "recipe.json").read_text())["begin"] == "efficientnet-lite0"
    kept = load_file(tmp_path / "a" / "capvid-small.safetensors")["stem.weight"].float()
    theirs = load_file(weights / "efficientnet-lite0.safetensors")["conv_stem.weight"]
    alike = torch.cosine_similarity(kept.flatten(1), theirs.flatten(1))  # folding scales whole filters
    assert bool((alike > 0.999).all())


@pytest.mark.slow
def test_a_begun_student_learns(inputs: DistilInputs, tmp_path: Path, weights: Path) -> None:
    toy = recipe(begin="efficientnet-lite0", epochs=4, learning_rate=1e-4, least_area=0.8)
    records = run(toy, replace(inputs, weights=weights), tmp_path / "run")
    assert records[-1]["loss"] < 0.85 * records[0]["loss"]
    assert records[-1]["val_words"] < records[0]["val_words"]
    assert records[-1]["val_colour-grid"] < 0.95  # 1: told the mean


@pytest.mark.slow
def test_a_begun_run_resumes_without_beginning_again(
    inputs: DistilInputs, tmp_path: Path, weights: Path
) -> None:
    toy, begun = recipe(begin="efficientnet-lite0", learning_rate=1e-4), replace(inputs, weights=weights)
    whole = run(toy, begun, tmp_path / "whole")
    with pytest.raises(StoppedError):
        make_distiller(toy, begun, folder=tmp_path / "parts", device=CPU, reporter=Stopping()).run()
    rest = run(toy, inputs, tmp_path / "parts", resume=True)  # the weights are not needed any more
    assert [record["epoch"] for record in rest] == [3]
    for key in ("loss", "val_colour-grid"):
        assert rest[-1][key] == pytest.approx(whole[-1][key], abs=1e-5)


def test_what_cannot_begin_is_said(inputs: DistilInputs, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="capvid-small cannot begin with its weights"):
        run(recipe(begin="resnet50"), inputs, tmp_path / "run")
    toy = replace(recipe(begin="efficientnet-lite0"), backbone="resnet50")
    with pytest.raises(UsageError, match="begin = efficientnet-lite0: resnet50 cannot begin"):
        run(toy, inputs, tmp_path / "run")
    (tmp_path / "efficientnet-lite0.safetensors").write_bytes(b"something else")
    with pytest.raises(WeightsError, match=r"efficientnet-lite0\.safetensors"):
        run(recipe(begin="efficientnet-lite0"), replace(inputs, weights=tmp_path), tmp_path / "run")


def ramps(height: int, width: int) -> np.ndarray:
    """An image (H, W, 3) whose pixels say where they are: row, column, 0."""
    rows, columns = np.mgrid[:height, :width]
    return np.stack([rows, columns, np.zeros_like(rows)], -1).astype(np.uint8)


def test_views_are_parts_drawn_by_picture_and_number() -> None:
    image, mirrored, areas = ramps(96, 128), 0, []
    for row in range(60):
        part = random_crop(image, row, 0)
        np.testing.assert_array_equal(part, random_crop(image, row, 0))
        rows, columns = part[:, 0, 0].astype(int), part[0, :, 1].astype(int)
        mirrored += columns[0] > columns[-1]
        top, left = rows[0], columns.min()
        there = image[top : top + len(rows), left : left + len(columns)]
        np.testing.assert_array_equal(part, there[:, ::-1] if columns[0] > columns[-1] else there)
        areas.append(len(rows) * len(columns) / (96 * 128))
    assert 15 < mirrored < 45
    assert 0.35 < min(areas) < 0.5 < 0.85 < max(areas) <= 1
    assert random_crop(image, 1, 0).tobytes() != random_crop(image, 1, 1).tobytes()
    assert random_crop(ramps(10, 20), 0, 0).shape == (10, 20, 3)  # nothing of a small one is cut off


def part_of(images: list[ImageSource], row: int, number: int) -> np.ndarray:
    """The view of one image, cut from what is in its file: (1, h', w', 3)."""
    image = np.asarray(Image.open(io.BytesIO(images[row].read())).convert("RGB"))
    return random_crop(image, row, number)[None]


def test_each_teacher_sees_the_view_itself(inputs: DistilInputs, tmp_path: Path) -> None:
    how = replace(backbone_entry("capvid-small").preprocess, trim=False)
    distiller = make_distiller(recipe(views=2), inputs, folder=tmp_path, device=CPU, reporter=Silent())
    images, (whole, _, second) = find_images(inputs.images), distiller.data.shown
    part, teacher = part_of(images, 5, 1), load_backbone("colour-grid")
    np.testing.assert_array_equal(second.images[5], prepare(part, how)[0].transpose(2, 0, 1))
    seen = second.features["colour-grid"]
    np.testing.assert_array_equal(seen[5].numpy(), teacher(part)[0].astype(np.float16))
    assert not torch.allclose(seen[5], whole.features["colour-grid"][5], atol=0.01)
    kept = tmp_path / "cache" / "views-1-colour-grid.safetensors"
    np.testing.assert_array_equal(load_file(kept)["features"].numpy(), seen.numpy())


def test_views_are_found_again(inputs: DistilInputs, tmp_path: Path) -> None:
    images, how = find_images(inputs.images), backbone_entry("capvid-small").preprocess
    kept = tmp_path / "features.safetensors"
    states = []
    for number in (0, 0, 1):
        view = make_view(images, number, how, tmp_path / "views.u8", workers=1)
        seen = teacher_features(images, "colour-grid", "grid", known={}, path=kept, view=view)
        states.append((view.images.tobytes(), seen.tobytes(), kept.stat().st_mtime_ns))
    first, again, other = states
    assert first == again
    assert all(mine != theirs for mine, theirs in zip(first, other, strict=True))


def as_teacher(name: str, module: nn.Module) -> Backbone:
    """A network that stands for a teacher with the preprocessing of ``name``."""
    entry = backbone_entry(name)
    width = entry.layers[entry.default_layer].width
    header = StreamHeader(backbone=name, layer=entry.default_layer, width=width)
    return Backbone(entry=entry, layer=entry.default_layer, module=module, header=header, device=CPU)


@torch.inference_mode()
def test_a_teacher_of_clips_sees_the_students_pixels_whole(inputs: DistilInputs, tmp_path: Path) -> None:
    images = find_images(inputs.images)[:3]
    view = make_view(images, 0, backbone_entry("capvid-small").preprocess, tmp_path / "v.u8", workers=1)
    torch.manual_seed(4)
    network = nn.Sequential(nn.Conv3d(3, 6, 3), nn.AdaptiveAvgPool3d(2), nn.Flatten())
    crops = np.concatenate(list(view_crops(view, images, as_teacher("x3d-xs", network), 1)))
    assert crops.shape == (3, 4, 128, 176, 3)
    pixels = torch.from_numpy(np.array(view.images))
    still = ((pixels / 255 - 0.45) / 0.225).unsqueeze(2).expand(-1, -1, 4, -1, -1)
    found = as_teacher("x3d-xs", network).compute(crops)
    torch.testing.assert_close(torch.from_numpy(found), network(still), atol=1e-5, rtol=1e-4)


def test_a_teacher_of_clips_of_one_size_is_refused(
    inputs: DistilInputs, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    network = nn.Sequential(nn.Flatten(), nn.Linear(3 * 16 * 112 * 112, 2))
    monkeypatch.setattr(targets, "load_backbone", lambda *_, **__: as_teacher("c3d", network))
    images = find_images(inputs.images)[:2]
    view = make_view(images, 0, backbone_entry("capvid-small").preprocess, tmp_path / "v.u8", workers=1)
    with pytest.raises(UsageError, match=r"c3d does not accept views of 128 x 176.*set training\.views = 0"):
        teacher_features(images, "c3d", "fc6", known={}, path=tmp_path / "f", view=view)


@pytest.mark.slow
def test_a_step_whose_gradient_is_not_finite_is_left_out(inputs: DistilInputs, tmp_path: Path) -> None:
    distiller = make_distiller(recipe(epochs=1), inputs, folder=tmp_path, device=CPU, reporter=Silent())
    row = int(distiller.data.train[0])
    distiller.data.shown[0].features["colour-grid"][row] = float("inf")
    record = distiller.run()
    assert np.isfinite(record["loss"])
    assert (distiller.step, distiller.average.steps) == (4, 3)
    assert all(bool(tensor.isfinite().all()) for tensor in distiller.model.state_dict().values())
    with pytest.raises(TrainingError, match=r"no batch of epoch 2 .* lower training\.learning_rate"):
        run(recipe(epochs=2, learning_rate=1e30), inputs, tmp_path / "wild")


def gradients(conv: nn.Conv2d, maps: Tensor, share: int, start: int) -> tuple[Tensor, ...]:
    """The outputs, and the gradients of maps, kernel and bias for one that points elsewhere at each place."""
    conv.zero_grad()
    leaf = maps.clone().requires_grad_()
    if share:
        found = DepthwiseConv.apply(leaf, conv.weight, conv.bias, conv.stride[0], share, start)
    else:
        found = conv(leaf)
    found.backward(torch.randn(found.shape, generator=torch.Generator().manual_seed(6)))
    assert leaf.grad is not None and conv.weight.grad is not None and conv.bias is not None
    assert conv.bias.grad is not None
    return found.detach(), leaf.grad, conv.weight.grad, conv.bias.grad


@pytest.mark.parametrize(("kernel", "stride", "size"), [(3, 1, (9, 12)), (5, 2, (8, 11)), (3, 2, (7, 10))])
def test_depthwise_gradients_are_autograds(kernel: int, stride: int, size: tuple[int, int]) -> None:
    """From all images exactly; from a share of them on average, for a batch that does not divide."""
    torch.manual_seed(5)
    conv = nn.Conv2d(6, 6, kernel, stride, kernel // 2, groups=6)
    maps = torch.randn(7, 6, *size)
    wanted = gradients(conv, maps, 0, 0)
    for ours, theirs in zip(gradients(conv, maps, 1, 0), wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    estimates = [gradients(conv, maps, 3, start) for start in range(3)]
    mean = [torch.stack(each).mean(0) for each in zip(*estimates, strict=True)]
    for ours, theirs in zip(mean, wanted, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-4, rtol=1e-4)
    assert not torch.allclose(estimates[0][2], wanted[2], rtol=0.1)


def test_depthwise_convolutions_are_changed_for_bfloat16_alone_and_repeatably() -> None:
    torch.manual_seed(7)
    network = nn.Sequential(nn.Conv2d(3, 8, 1), nn.Conv2d(8, 8, 3, 2, 1, groups=8), nn.ReLU())
    images = torch.randn(6, 3, 10, 10)

    def learned(seed: int | None, *, bf16: bool) -> list[Tensor]:
        network.zero_grad()
        fast = nullcontext() if seed is None else fast_depthwise(network, torch.Generator().manual_seed(seed))
        with fast, torch.autocast("cpu", torch.bfloat16, enabled=bf16):
            found = network(images)
        found.float().square().sum().backward()
        return [found.detach().float(), *(p.grad.clone() for p in network.parameters() if p.grad is not None)]

    plain, ours, again, other = (learned(seed, bf16=True) for seed in (None, 1, 1, 2))
    torch.testing.assert_close(ours[0], plain[0])
    for one, two in zip(ours, again, strict=True):
        assert torch.equal(one, two)
    estimated = 3  # the depthwise kernel, behind the output and two tensors of the first convolution
    assert not torch.equal(ours[estimated], other[estimated])
    for number in (1, 2, 4):
        torch.testing.assert_close(ours[number], plain[number], atol=0.05, rtol=0.05)
    for one, two in zip(learned(1, bf16=False), learned(None, bf16=False), strict=True):
        assert torch.equal(one, two)
    assert "forward" not in vars(network[1])


@pytest.mark.slow
@needs_bf16
def test_a_run_in_bfloat16_is_repeatable(inputs: DistilInputs, tmp_path: Path) -> None:
    toy = recipe(epochs=1, precision="bf16")
    first, second = (run(toy, inputs, tmp_path / name)[0] for name in ("a", "b"))
    assert first["loss"] == second["loss"]
    assert first["val_colour-grid"] == second["val_colour-grid"]

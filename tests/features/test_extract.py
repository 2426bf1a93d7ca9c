from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from capvid.backbones import backbone as loading
from capvid.backbones.backbone import Backbone, load_backbone
from capvid.backbones.catalog import StreamHeader, backbone_entry
from capvid.errors import CapvidError, UsageError, VideoError
from capvid.features.augmentation import Augmentation
from capvid.features.extraction import ExtractionResult, extract
from capvid.features.feature_file import load_features, save_features
from capvid.video import readers
from capvid.video.frame_sampling import Reduce, UniformSampling, Windows
from capvid.video.frame_source import VideoInfo
from capvid.video.readers import SampledFrames, read_frames

SAMPLING = UniformSampling(4)


class Threads:
    """What a pool of workers is, in threads of this process, where reading can be watched."""

    timeout = None

    def __init__(self, size: int = 2) -> None:
        self.size = size
        self._pool = ThreadPoolExecutor(size)
        self.submit = self._pool.submit


def extracted(inputs: Iterable[Any], backbones: Sequence[Backbone], **options: Any) -> Any:
    pool: Any = Threads(options.pop("workers", 2))
    return extract(inputs, backbones, SAMPLING, pool=pool, **options)


class Quadrants(nn.Module):
    """Mean of each quarter of the picture and channel, (N, 12): a network whose output can be foreseen."""

    def __init__(self, before: Callable[[Tensor], None] = lambda images: None) -> None:
        super().__init__()
        self.before = before

    def forward(self, images: Tensor) -> Tensor:
        self.before(images)
        return nn.functional.avg_pool2d(images, 112).flatten(1)


def make_backbone(network: nn.Module, name: str = "googlenet") -> Backbone:
    header = StreamHeader(backbone=name, layer="quadrants", width=12)
    device = torch.device("cpu")
    return Backbone(
        entry=backbone_entry(name), layer="quadrants", module=network, header=header, device=device
    )


def shades(path: Path) -> list[int]:
    """Grey values of a made-up video's frames: ``video-7-3`` has three from 7 on."""
    _, first, count = path.stem.split("-")
    return list(range(int(first), int(first) + int(count)))


@pytest.fixture
def made_up_videos(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """``read_frames`` makes grey frames out of the name; the list tells which were asked for."""
    asked: list[str] = []

    def read(
        path: Path,
        sampling: UniformSampling,
        *,
        reader: str,
        reduce: Reduce,
        windows: Sequence[Windows],
        hdr_side: int | None,
    ) -> SampledFrames:
        asked.append(path.stem)
        if path.stem == "bug":
            raise RuntimeError("a decoder's own words")
        if path.stem == "gone":
            raise VideoError(path, "no such file", kind="missing")
        values = np.array(shades(path), np.uint8)
        frames = np.ones((len(values), 300, 260, 3), np.uint8) * values[:, None, None, None]
        info = VideoInfo(
            path=path,
            reader="made-up",
            codec="",
            width=260,
            height=300,
            num_frames=1,
            duration=1,
            fps=1,
        )
        every = np.arange(len(values))
        assert all((window.choose(every, every) == every[:, None]).all() for window in windows)
        seen = tuple(window.reduce(frames)[:, None] for window in windows if window.reduce)
        return SampledFrames(frames=reduce(frames), times=every / 4, info=info, windows=seen)

    monkeypatch.setattr("capvid.video.readers.read_frames", read)
    return asked


def expected_features(path: Path) -> np.ndarray:
    """The quarters' means of grey frames, BGR minus mean, as float16 keeps them: (T, 12)."""
    grey = np.array(shades(path), np.float32)[:, None] - np.array([104, 117, 123], np.float32)
    return grey.repeat(4, axis=1).astype(np.float16).astype(np.float32)


@pytest.mark.parametrize("batch_size", [1, 3, 8, 100])
@pytest.mark.parametrize("workers", [1, 3])
def test_each_video_gets_its_own_features_in_order(
    made_up_videos: list[str], batch_size: int, workers: int
) -> None:
    paths = [Path(f"v-{10 * i}-{1 + i % 5}.mp4") for i in range(14)]
    results = list(extracted(paths, [make_backbone(Quadrants())], workers=workers, batch_size=batch_size))
    assert [result.path for result in results] == paths
    for result in results:
        assert result.error is None and result.features is not None
        np.testing.assert_array_equal(result.features.streams[0], expected_features(result.path))
        np.testing.assert_array_equal(result.features.times, np.arange(len(shades(result.path))) / 4)
        assert result.features.video == result.path.stem


@pytest.mark.parametrize("batch_size", [1, 4, 30])
def test_batches_are_full_and_reach_across_videos(made_up_videos: list[str], batch_size: int) -> None:
    sizes: list[int] = []
    backbone = make_backbone(Quadrants(lambda images: sizes.append(len(images))))
    paths = [f"v-{i}-3.mp4" for i in range(10)]
    list(extracted(paths, [backbone], batch_size=batch_size))
    assert sizes == [8, 8, 8, 8]  # 30 frames


def test_inputs_that_fail_do_not_hold_up_a_video(made_up_videos: list[str]) -> None:
    taken = 0

    def paths() -> Iterator[str]:
        nonlocal taken
        for taken in range(1000):
            yield "gone.mp4" if taken else "v-1-2.mp4"

    results = extracted(paths(), [make_backbone(Quadrants())], batch_size=16)
    first = next(iter(results))
    assert first.features is not None and taken < 60
    results.close()


def test_the_header_says_how_the_features_were_made(made_up_videos: list[str]) -> None:
    backbones = [make_backbone(Quadrants()), make_backbone(Quadrants(), "resnet50")]
    (result,) = extracted(["v-5-2.mp4"], backbones, dtype="float32")
    assert result.features is not None
    header = result.features.header
    assert [stream.backbone for stream in header.streams] == ["googlenet", "resnet50"]
    assert (header.sampling, header.reader, header.dtype) == ("uniform:4", "made-up", "float32")
    rgb = (np.array([5.0, 6.0])[:, None] / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]
    np.testing.assert_allclose(result.features.streams[1], rgb.repeat(4, axis=1), rtol=1e-3)


def test_a_bad_file_is_a_result_and_the_others_go_on(made_up_videos: list[str]) -> None:
    paths = ["gone.mp4", "v-1-2.mp4", "bug.mp4", "v-2-2.mp4"]
    results = list(extracted(paths, [make_backbone(Quadrants())]))
    assert [str(result.path) for result in results] == paths
    assert [result.features is None for result in results] == [True, False, True, False]
    assert [result.error.kind for result in results[::2] if result.error] == ["missing", "internal"]
    assert "bug.mp4: internal error: RuntimeError: a decoder's own words" in str(results[2].error)


def test_values_that_float16_cannot_hold(made_up_videos: list[str]) -> None:
    class Large(Quadrants):
        def forward(self, images: Tensor) -> Tensor:
            return super().forward(images) * 1e4

    backbone = make_backbone(Large())
    (result,) = extracted(["v-5-2.mp4"], [backbone])
    assert result.features is None and "float16 cannot hold" in str(result.error)
    (result,) = extracted(["v-5-2.mp4"], [backbone], dtype="float32")
    assert result.features is not None


def test_decoding_goes_on_while_the_backbone_computes(
    made_up_videos: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backbone waits, at the first batch, for the decoding of a later video: it would wait for ever."""
    later = threading.Event()
    read = readers.read_frames

    def telling(path: Path, sampling: UniformSampling, *, reader: str = "auto", **more: Any) -> SampledFrames:
        if path.stem == "v-2-4":
            assert computing.wait(20)
            later.set()
        return read(path, sampling, reader=reader, **more)

    computing = threading.Event()
    met: list[bool] = []

    def wait(images: Tensor) -> None:
        computing.set()
        met.append(later.wait(20))

    monkeypatch.setattr("capvid.video.readers.read_frames", telling)
    paths = [f"v-{i}-4.mp4" for i in range(4)]
    results = list(extracted(paths, [make_backbone(Quadrants(wait))], workers=1, batch_size=4))
    assert met and all(met)
    assert len(results) == 4


@pytest.mark.slow
def test_inputs_are_taken_as_they_are_needed(made_up_videos: list[str]) -> None:
    taken = 0

    def inputs() -> Iterator[str]:
        nonlocal taken
        for index in range(200):
            taken += 1
            yield f"v-{index}-4.mp4"

    ahead = []
    one_lane = dataclasses.replace(make_backbone(Quadrants()), threads=1)
    for done, _ in enumerate(extracted(inputs(), [one_lane], batch_size=8), 1):
        ahead.append(taken - done)
    assert done == 200
    # two to fill a batch, two workers, one being submitted, and two batches of two that are computed
    assert max(ahead) <= 9


def test_stopping_early_decodes_no_more(made_up_videos: list[str]) -> None:
    results = extracted((f"v-{i}-4.mp4" for i in range(200)), [make_backbone(Quadrants())])
    next(results)
    results.close()
    assert len(made_up_videos) < 60


def test_a_key_names_the_video(made_up_videos: list[str]) -> None:
    @dataclasses.dataclass
    class Input:
        path: Path
        key: str

    given = [Input(Path("day1/v-1-2.mp4"), "day1/v-1-2"), Input(Path("day2/v-1-2.mp4"), "day2/v-1-2")]
    results = list(extracted(given, [make_backbone(Quadrants())]))
    assert [result.features.video for result in results if result.features] == ["day1/v-1-2", "day2/v-1-2"]
    assert [result.path for result in results] == [item.path for item in given]


@pytest.mark.parametrize("batch_size", [1, 5, 100])
def test_a_video_and_its_views_are_decoded_together(made_up_videos: list[str], batch_size: int) -> None:
    """A view of grey frames has other light and nothing else."""

    @dataclasses.dataclass
    class Input:
        path: Path
        key: str
        variants: tuple[Augmentation | None, ...]

    paths = [Path(f"v-{20 * n}-{1 + n % 4}.mp4") for n in range(1, 7)]
    views = [(None, Augmentation(1, "x"), Augmentation(2, "x")), (Augmentation(2, "y"),)]
    inputs = [Input(path, f"k{n}", views[n % 2]) for n, path in enumerate(paths)]
    backbones = [make_backbone(Quadrants()), make_backbone(Quadrants(), "resnet50")]
    results = list(extracted([*inputs, "gone.mp4"], backbones, batch_size=batch_size))
    assert results.pop().error is not None and made_up_videos.count("v-20-2") == 1
    for item, result in zip(inputs, results, strict=True):
        made = (result.features, *result.further)
        assert len(made) == len(item.variants)
        for variant, features in zip(item.variants, made, strict=True):
            grey = np.array(shades(item.path), np.float64)
            if variant is not None:
                grey = np.rint(grey * [view.brightness for view in variant.draw(len(grey))])
            bgr = (grey[:, None] - [104, 117, 123]).repeat(4, axis=1)
            rgb = ((grey[:, None] / 255 - [0.485, 0.456, 0.406]) / [0.229, 0.224, 0.225]).repeat(4, axis=1)
            np.testing.assert_array_equal(features.streams[0], bgr)
            np.testing.assert_allclose(features.streams[1], rgb, atol=2e-3)
            assert (features.video, features.view) == (item.key, variant.number if variant else 0)
            np.testing.assert_array_equal(features.times, np.arange(len(grey)) / 4)


@pytest.mark.parametrize("change", [{"workers": 0}, {"batch_size": 0}, {"dtype": "int8"}, {"backbones": []}])
def test_what_cannot_be_used_is_said_at_the_call(change: dict[str, object]) -> None:
    arguments: dict[str, object] = {"backbones": [make_backbone(Quadrants())], **change}
    with pytest.raises(UsageError):
        extract([], sampling=SAMPLING, **arguments)  # type: ignore[arg-type]


def test_an_error_that_concerns_all_videos_is_raised(made_up_videos: list[str]) -> None:
    def fail(images: Tensor) -> None:
        raise torch.cuda.OutOfMemoryError("out of memory")

    with pytest.raises(CapvidError, match="has not enough memory for 8 frames of googlenet"):
        list(extracted(["v-1-2.mp4"], [make_backbone(Quadrants(fail))]))


def write_video(path: Path, values: list[int], *, contrast: int = 0) -> Path:
    """A video of grey frames at 5 per second, losslessly kept; what is not black is brighter at the right."""
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", rate=5, options={"qp": "0"})
        stream.width, stream.height, stream.pix_fmt = 64, 48, "yuv444p"
        for value in values:
            picture = np.full((48, 64, 3), value, np.uint8)
            picture[:, 32:] += contrast if value else 0
            container.mux(stream.encode(av.VideoFrame.from_ndarray(picture, format="rgb24")))
        container.mux(stream.encode())
    return path


def test_real_files_from_video_to_feature_file_and_back(tmp_path: Path) -> None:
    values = [20, 60, 100, 140, 180, 220, 60, 20]
    good = write_video(tmp_path / "good.mp4", values)
    bad = tmp_path / "bad.mp4"
    bad.write_bytes(b"not a video at all" * 40)
    inputs = [bad, good, tmp_path / "missing.mp4"]
    results: list[ExtractionResult] = list(extract(inputs, [make_backbone(Quadrants())], SAMPLING))
    assert [result.error is None for result in results] == [False, True, False]
    features = results[1].features
    assert features is not None and features.times is not None
    np.testing.assert_allclose(features.times, [0.2, 0.6, 1.0, 1.4], atol=1e-6)
    grey = np.array([60, 140, 220, 20], np.float32)[:, None] - np.repeat([104, 117, 123], 4)
    np.testing.assert_allclose(features.streams[0], grey, atol=2)
    save_features(tmp_path / "good.safetensors", features)
    np.testing.assert_array_equal(
        load_features(tmp_path / "good.safetensors").streams[0], features.streams[0]
    )


class Shades(nn.Module):
    """Mean grey value of each frame of a clip, (N, C, 4, S, S) -> (N, 4)."""

    def forward(self, clips: Tensor) -> Tensor:
        assert clips.shape[1:] == (3, 4, 160, 160)
        return (clips.mean((1, 3, 4)) * 0.225 + 0.45) * 255


def test_a_network_of_clips_beside_one_of_frames(tmp_path: Path) -> None:
    """At 5 frames a second the window of frame n is n - 3, n - 1, n + 1 and n + 3, inside the video."""
    values = [20, 60, 100, 140, 180, 220, 60, 20]
    path = write_video(tmp_path / "v.mp4", values)
    header = StreamHeader(backbone="x3d-xs", layer="shades", width=4)
    clips = dataclasses.replace(make_backbone(Shades(), "x3d-xs"), header=header, layer="shades")
    for backbones in ([make_backbone(Quadrants()), clips], [clips, clips, make_backbone(Quadrants())]):
        (result,) = extract([path], backbones, SAMPLING)
        features = result.features
        assert features is not None and features.times is not None, result.error
        assert [stream.backbone for stream in features.header.streams] == [
            backbone.header.backbone for backbone in backbones
        ]
        np.testing.assert_allclose(features.times, [0.2, 0.6, 1.0, 1.4], atol=1e-6)
        grey = np.array([60, 140, 220, 20], np.float32)[:, None] - np.repeat([104, 117, 123], 4)
        seen = [[values[min(max(n + d, 0), 7)] for d in (-3, -1, 1, 3)] for n in (1, 3, 5, 7)]
        for backbone, stream in zip(backbones, features.streams, strict=True):
            np.testing.assert_allclose(stream, seen if backbone is clips else grey, atol=2)


def test_clips_with_random_weights_beside_frames(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from safetensors.torch import save_file

    from capvid.backbones.clip_networks import X3DXS

    torch.manual_seed(0)
    entry = dataclasses.replace(backbone_entry("x3d-xs"), sha256=None, fingerprint=None)
    save_file(X3DXS().state_dict(), tmp_path / entry.file)
    monkeypatch.setattr(
        loading, "backbone_entry", {"x3d-xs": entry, "grid": backbone_entry("colour-grid")}.get
    )
    backbones = [load_backbone("grid"), load_backbone("x3d-xs", layer="lin5", weights=tmp_path)]
    path = write_video(tmp_path / "v.mp4", [20, 60, 100, 140, 180, 220, 60, 20])
    (result,) = extract([path], backbones, UniformSampling(3), dtype="float32")
    assert result.features is not None, result.error
    grid, motion = result.features.streams
    sampled = read_frames(path, UniformSampling(3), windows=[Windows(offsets=(-0.6, -0.2, 0.2, 0.6))])
    np.testing.assert_array_equal(grid, backbones[0](sampled.frames))
    assert motion.shape == (3, 2048)
    np.testing.assert_allclose(motion, backbones[1](sampled.windows[0]), rtol=1e-4, atol=1e-6)


def test_frames_that_show_nothing_new_are_left_out_with_their_windows(tmp_path: Path) -> None:
    values = [0, 0, 60, 60, 0, 0, 180, 180]  # a video of two pictures, each after darkness
    path = write_video(tmp_path / "v.mp4", values, contrast=70)
    header = StreamHeader(backbone="x3d-xs", layer="shades", width=4)
    clips = dataclasses.replace(make_backbone(Shades(), "x3d-xs"), header=header, layer="shades")
    sampling = UniformSampling(8, clean=True)
    (result,) = extract([path], [make_backbone(Quadrants()), clips], sampling)
    features = result.features
    assert features is not None and features.times is not None, result.error
    assert features.header.sampling == "uniform:8+clean"
    np.testing.assert_allclose(features.times, [0.4, 1.2], atol=1e-6)
    assert [len(stream) for stream in features.streams] == [2, 2]
    darkness = features.streams[1] < 40
    assert darkness.tolist() == [[True, True, False, True], [False, True, False, False]]


def test_one_video_by_the_name_of_a_backbone(tmp_path: Path) -> None:
    path = write_video(tmp_path / "v.mp4", [20, 60, 100, 140])
    done: list[ExtractionResult] = []
    results = list(extract(str(path), "colour-grid", "uniform:2", device="cpu", progress=done.append))
    assert results == done and len(results) == 1
    features = results[0].features
    assert features is not None and features.streams[0].shape == (2, 192)
    assert features.header.sampling == "uniform:2"
    with pytest.raises(UsageError, match="unknown backbone"):
        extract([path], ["no-such-backbone"])

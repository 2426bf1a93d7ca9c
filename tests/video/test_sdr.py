"""HDR and wide-gamut frames against the equations of the standards, computed here for one pixel at a time."""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path

import av
import numpy as np
import pytest

from capvid.backbones.catalog import Preprocess
from capvid.backbones.preprocessing import prepare
from capvid.errors import VideoError
from capvid.video.frame_sampling import UniformSampling
from capvid.video.readers import open_video, read_frames

RAMP = list(range(64, 941, 12))  # code values of the grey ramp, 10 bits
PATCHES = [(600, 480, 600), (500, 600, 470), (420, 440, 520), (560, 512, 540), (700, 500, 520)]  # Y', Cb, Cr
CELL = 16  # pixels
MASTERING = "G(13250,34500)B(7500,3000)R(34000,16000)WP(15635,16450)L({}0000,50)"
TO_BT709 = [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]]
P3_TO_BT709 = [[1.2249, -0.2247, 0.0], [-0.0420, 1.0419, 0.0], [-0.0197, -0.0786, 1.0979]]


def write_cells(path: Path, tags: tuple[int, int, int], x265: str = "") -> list[tuple[int, int, int]]:
    """Write one frame of cells without loss, tagged (transfer, primaries, matrix); return their codes."""
    cells = [(code, 512, 512) for code in RAMP] + PATCHES
    luma, *chroma = (np.repeat([cell[plane] for cell in cells], CELL).astype("<u2") for plane in range(3))
    frame = av.VideoFrame(len(luma), 64, "yuv420p10le")
    for plane, row, height in zip(
        frame.planes, (luma, chroma[0][::2], chroma[1][::2]), (64, 32, 32), strict=True
    ):
        padded = np.zeros((height, plane.line_size // 2), "<u2")
        padded[:, : len(row)] = row
        plane.update(padded.tobytes())
    with av.open(str(path), "w") as output:
        options = {"x265-params": f"lossless=1:log-level=none{x265}", "preset": "ultrafast"}
        stream = output.add_stream("libx265", rate=25, options=options)
        stream.width, stream.height, stream.pix_fmt = frame.width, 64, "yuv420p10le"
        context = stream.codec_context
        context.color_trc, context.color_primaries, context.colorspace = tags
        context.color_range = 1
        frame.pts = 0
        output.mux(stream.encode(frame))
        output.mux(stream.encode())
    return cells


def rgb_codes(cell: tuple[int, int, int], red: float, blue: float) -> list[float]:
    """R'G'B' of a limited-range Y'CbCr in 10 bits, for the matrix with these weights of red and blue."""
    luma, cb, cr = (cell[0] - 64) / 876, (cell[1] - 512) / 896, (cell[2] - 512) / 896
    r, b = luma + 2 * (1 - red) * cr, luma + 2 * (1 - blue) * cb
    return [min(1, max(0, v)) for v in (r, (luma - red * r - blue * b) / (1 - red - blue), b)]


def pq_to_light(code: float) -> float:
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    root = code ** (1 / m2)
    return float(10000 * (max(root - c1, 0) / (c2 - c3 * root)) ** (1 / m1))


def light_to_pq(light: float) -> float:
    m1, m2, c1, c2, c3 = 0.1593017578125, 78.84375, 0.8359375, 18.8515625, 18.6875
    power = (light / 10000) ** m1
    return float(((c1 + c2 * power) / (1 + c3 * power)) ** m2)


def hlg_to_light(codes: list[float]) -> list[float]:
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = [v * v / 3 if v <= 0.5 else (math.exp((v - c) / a) + b) / 12 for v in codes]
    luminance = 0.2627 * scene[0] + 0.6780 * scene[1] + 0.0593 * scene[2]
    return [1000 * luminance**0.2 * v if luminance else 0.0 for v in scene]


def eetf(light: float, peak: float) -> float:
    """BT.2390-11, 5.4.1, with Lw = peak, Lb = Lmin = 0 and Lmax = 203."""
    e1, max_lum = min(1, light_to_pq(light) / light_to_pq(peak)), light_to_pq(203) / light_to_pq(peak)
    ks = 1.5 * max_lum - 0.5
    if e1 < ks:
        e2 = e1
    else:
        t = (e1 - ks) / (1 - ks)
        e2 = (
            (2 * t**3 - 3 * t**2 + 1) * ks
            + (t**3 - 2 * t**2 + t) * (1 - ks)
            + (-2 * t**3 + 3 * t**2) * max_lum
        )
    return pq_to_light(e2 * light_to_pq(peak))


def expected(codes: list[float], transfer: int, matrix: list[list[float]], peak: float) -> list[float]:
    if transfer == 1:
        light = [203 * v**2.4 for v in codes]
    else:
        light = [pq_to_light(v) for v in codes] if transfer == 16 else hlg_to_light(codes)
        brightest = max(*light, 1e-9)
        light = [v * eetf(brightest, peak) / brightest for v in light]
    linear = [sum(m * v for m, v in zip(row, light, strict=True)) / 203 for row in matrix]
    return [255 * min(1, max(0, v)) ** (1 / 2.4) for v in linear]


@pytest.mark.parametrize(
    ("transfer", "primaries", "peak", "name"),
    [
        (16, 9, 1000, "PQ BT.2020, peak 1000 cd/m2"),
        (16, 9, 4000, "PQ BT.2020, peak 4000 cd/m2"),
        (18, 9, 1000, "HLG BT.2020, peak 1000 cd/m2"),
        (1, 9, 203, "SDR BT.2020"),
        (1, 12, 203, "SDR P3"),
    ],
)
def test_frames_follow_the_equations(
    tmp_path: Path, transfer: int, primaries: int, peak: int, name: str
) -> None:
    path = tmp_path / "v.mkv"
    mastering = f":master-display={MASTERING.format(peak)}" if peak == 4000 else ""
    cells = write_cells(path, (transfer, primaries, 9 if primaries == 9 else 1), mastering)
    weights = (0.2627, 0.0593) if primaries == 9 else (0.2126, 0.0722)
    matrix = TO_BT709 if primaries == 9 else P3_TO_BT709
    with open_video(path) as source:
        assert source.info.color == f"{name}, converted to BT.709 SDR"
        middles = source.read([0])[0, 32, CELL // 2 :: CELL].astype(float)
    target = np.array([expected(rgb_codes(cell, *weights), transfer, matrix, peak) for cell in cells])
    np.testing.assert_allclose(middles, target, rtol=0, atol=3)  # at the edge of the gamut
    assert np.abs(middles[: len(RAMP)] - target[: len(RAMP)]).max() < 1.2
    assert (np.diff(middles[: len(RAMP), 1]) >= 0).all()


@pytest.mark.parametrize(("transfer", "code"), [(16, 572.6), (18, 721)])  # 58 % PQ, 75 % HLG: BT.2408
def test_reference_white_is_nearly_white(transfer: int, code: float) -> None:
    white = expected([(code - 64) / 876] * 3, transfer, TO_BT709, 1000)
    assert all(228 < value < 233 for value in white)


@pytest.mark.slow
@pytest.mark.shared
@pytest.mark.parametrize("name", ["media__hlg10-color-test.mp4", "media__hdr10-av1.mp4"])
def test_smaller_frames_look_the_same(shared_data: Path, name: str) -> None:
    """What a network sees does not depend on whether frames are reduced before or after the conversion."""
    view = Preprocess(
        resize=256, crop=224, order="RGB", scale=255.0, mean=(0.5, 0.5, 0.5), std=(0.5, 0.5, 0.5)
    )
    reduce = partial(prepare, preprocess=view)
    path = shared_data / "media" / name
    full, small = (
        read_frames(path, UniformSampling(3), reduce=reduce, hdr_side=side) for side in (None, 320)
    )
    assert 320 <= min(small.info.width, small.info.height) < min(full.info.width, full.info.height)
    assert np.abs(full.frames.astype(int) - small.frames).mean() < 1.5


def test_decord_names_the_other_reader_for_hdr(tmp_path: Path) -> None:
    path = tmp_path / "v.mkv"
    write_cells(path, (18, 9, 9))
    with pytest.raises(VideoError, match="use the reader pyav"):
        open_video(path, reader="decord")


@pytest.mark.parametrize("tags", [(1, 1, 1), (2, 2, 2), (6, 6, 6), (13, 1, 1)])
def test_sdr_is_left_alone(tmp_path: Path, tags: tuple[int, int, int]) -> None:
    path = tmp_path / "v.mkv"
    write_cells(path, tags)
    sampled = read_frames(path, UniformSampling(1))
    with av.open(str(path)) as container:
        frame = next(container.decode(video=0)).to_ndarray(format="rgb24")
    assert sampled.info.color == ""
    assert (read_frames(path, UniformSampling(1), hdr_side=16).frames == sampled.frames).all()
    assert (sampled.frames[0] == frame).all()

"""Conversion of HDR and wide-gamut frames to what networks were trained on: BT.709 SDR.

1. Code values become display light: for PQ by the EOTF of SMPTE ST 2084; for HLG by the inverse OETF and the
   OOTF of BT.2100 on a display of 1000 cd/m2 (system gamma 1.2); for SDR by gamma 2.4 (BT.1886).
2. HDR highlights roll off to 203 cd/m2, the reference white of BT.2408, by the EETF of BT.2390-11 (section
   5.4.1). It is applied to the largest of R, G and B, and all three are scaled alike, which keeps the hue.
   The peak of the source is that of its mastering display if the file names it, or 1000 cd/m2, for which a
   white of 203 cd/m2 becomes 230 of 255.
3. Primaries are converted to BT.709, cutting off what is outside, and light is encoded with gamma 1/2.4.

The result depends on nothing but R'G'B', so FFmpeg's ``lut3d`` can take it from a table.
"""

from __future__ import annotations

import struct
import tempfile
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from av.filter import Graph
from av.sidedata.sidedata import Type
from av.video.reformatter import Interpolation, VideoReformatter

WHITE = 203.0  # cd/m2 of SDR white
PEAK = 1000.0  # cd/m2 of the brightest HDR colour where the file names none
_SIZE = 33  # of the table, per colour
_FORMAT = "gbrp16le"  # for which lut3d is fast
TRANSFERS = {16: "PQ", 18: "HLG"}  # by FFmpeg's number
_GAMUTS = {9: "BT.2020", 11: "P3", 12: "P3"}
_TO_BT709 = {  # linear RGB to linear RGB (BT.2087-0; SMPTE EG 432-1 with the white of D65)
    "BT.2020": [[1.6605, -0.5876, -0.0728], [-0.1246, 1.1329, -0.0083], [-0.0182, -0.1006, 1.1187]],
    "P3": [[1.2249, -0.2247, 0], [-0.0420, 1.0419, 0], [-0.0197, -0.0786, 1.0979]],
}


class Color(NamedTuple):
    """The colours of a video, as far as they differ from BT.709 SDR."""

    transfer: str  # PQ, HLG or SDR
    gamut: str  # BT.2020, P3 or BT.709
    peak: float = WHITE  # cd/m2

    def __str__(self) -> str:
        hdr = "" if self.transfer == "SDR" else f", peak {self.peak:g} cd/m2"
        return f"{self.transfer} {self.gamut}{hdr}, converted to BT.709 SDR"


def color_of(image: Any) -> Color | None:
    """Return the colours of a decoded image; None if they are shown as they are."""
    transfer = TRANSFERS.get(image.color_trc, "SDR")
    gamut = _GAMUTS.get(image.color_primaries, "BT.709")
    if transfer == "SDR":
        return None if gamut == "BT.709" else Color(transfer, gamut)
    return Color(transfer, gamut, _mastering_peak(image) if transfer == "PQ" else PEAK)


def _mastering_peak(image: Any) -> float:
    """Return the peak of the mastering display in cd/m2 (``AVMasteringDisplayMetadata``)."""
    try:
        data = bytes(image.side_data[Type.MASTERING_DISPLAY_METADATA])
    except (KeyError, ValueError):  # ValueError: beside data of a kind that PyAV does not know
        return PEAK
    # ten rationals, of primaries, white and minimum and maximum luminance; and whether the latter are known
    *_, numerator, denominator, _, known = struct.unpack_from("=22i", data)
    return min(10000.0, max(WHITE, numerator / denominator)) if known and denominator > 0 else PEAK


def pq_light(code: np.ndarray) -> np.ndarray:
    """Return the light in cd/m2 of PQ code values in 0 to 1 (SMPTE ST 2084, equation 4.1)."""
    root = code ** (32 / 2523)
    return 10000 * (np.maximum(root - 3424 / 4096, 0) / (2413 / 128 - 2392 / 128 * root)) ** (16384 / 2610)


def pq_code(light: np.ndarray) -> np.ndarray:
    """Return the PQ code values of light in cd/m2 (SMPTE ST 2084, equation 5.2)."""
    root = (light / 10000) ** (2610 / 16384)
    return ((3424 / 4096 + 2413 / 128 * root) / (1 + 2392 / 128 * root)) ** (2523 / 32)


def hlg_light(code: np.ndarray) -> np.ndarray:
    """Return the light (..., 3) in cd/m2 of HLG R'G'B' in 0 to 1, on a display of 1000 cd/m2 (BT.2100-2)."""
    a, b, c = 0.17883277, 0.28466892, 0.55991073
    scene = np.where(code <= 0.5, code**2 / 3, (np.exp((code - c) / a) + b) / 12)
    luminance = scene @ np.array([0.2627, 0.6780, 0.0593])
    return PEAK * scene * np.maximum(luminance, 1e-9)[..., None] ** 0.2


def roll_off(light: np.ndarray, peak: float) -> np.ndarray:
    """Map light of up to ``peak`` cd/m2 to at most 203 (EETF of BT.2390-11, 5.4.1, for a black of 0)."""
    top = float(pq_code(np.array(peak)))
    code = np.minimum(pq_code(light) / top, 1)
    white = float(pq_code(np.array(WHITE))) / top
    knee = 1.5 * white - 0.5
    t = (code - knee) / max(1 - knee, 1e-9)
    spline = (
        (2 * t**3 - 3 * t**2 + 1) * knee + (t**3 - 2 * t**2 + t) * (1 - knee) + (3 * t**2 - 2 * t**3) * white
    )
    return pq_light(np.where(code < knee, code, spline) * top)


def to_sdr(code: np.ndarray, color: Color) -> np.ndarray:
    """Convert R'G'B' (..., 3), all in 0 to 1, to BT.709 SDR."""
    if color.transfer == "SDR":
        light = WHITE * code**2.4
    else:
        light = pq_light(code) if color.transfer == "PQ" else hlg_light(code)
        brightest = light.max(-1, keepdims=True)
        light = light * roll_off(brightest, color.peak) / np.maximum(brightest, 1e-9)
    if color.gamut != "BT.709":
        light = light @ np.array(_TO_BT709[color.gamut]).T
    return (light / WHITE).clip(0, 1) ** (1 / 2.4)


@lru_cache(maxsize=4)
def _table(color: Color, white: float) -> str:
    """Return the table of a conversion in the format .cube; the high bytes of its values are the result."""
    steps = np.minimum(np.linspace(0, 65535 / white, _SIZE), 1)
    blue, green, red = np.meshgrid(steps, steps, steps, indexing="ij")  # red changes fastest
    values = to_sdr(np.stack([red, green, blue], -1).reshape(-1, 3), color)
    values = (values * 255 + 0.5) * 256 / 65535
    return f"LUT_3D_SIZE {_SIZE}\n" + "\n".join(" ".join(f"{value:.6f}" for value in row) for row in values)


class SdrConverter:
    """Converter of images like the first one of a video, which has the colours ``color``, to BT.709 SDR."""

    def __init__(self, color: Color, image: Any) -> None:
        bits = image.format.components[0].bits
        # what swscale makes of the white of limited and of full range (2), in 16 bits
        white = 65282.5 if image.color_range != 2 else (1 << 16) - (1 << 16 - bits)
        self._table = _table(color, white)
        self._reformatter = VideoReformatter()
        self._graph: Any = None
        self._size: tuple[int, int] | None = None

    def convert(self, image: Any, width: int, height: int) -> np.ndarray:
        """Return an image as (height, width, 3) uint8 RGB."""
        if self._size != (width, height):
            self._configure(width, height)
        planar = self._reformatter.reformat(
            image, width=width, height=height, format=_FORMAT, interpolation=Interpolation.AREA, threads=1
        )
        self._graph.push(planar)
        converted = self._graph.pull()
        pixels = np.empty((height, width, 3), np.uint8)
        for channel, plane in zip((1, 2, 0), converted.planes, strict=True):
            rows = np.frombuffer(plane, np.uint8).reshape(height, plane.line_size)
            pixels[:, :, channel] = rows[:, 1 : 2 * width : 2]
        return pixels

    def _configure(self, width: int, height: int) -> None:
        self._graph, self._size = Graph(), (width, height)
        self._graph.threads = 1
        source = self._graph.add_buffer(width=width, height=height, format=_FORMAT, time_base=1)
        with tempfile.TemporaryDirectory(prefix="capvid-") as folder:
            path = Path(folder, "table.cube")
            path.write_text(self._table)
            table = self._graph.add("lut3d", file=str(path))
            sink = self._graph.add("buffersink")
            source.link_to(table)
            table.link_to(sink)
            self._graph.configure()  # reads the table

"""Bytes and seconds to plan 16 frames of a one-hour MP4, from all packets and from its index.

    python benchmarks/frame_plan.py CLIP

repeats the packets of the video stream of CLIP for one hour, and then opens that file in both ways.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import av

from capvid.video import probe, readers
from capvid.video.frame_sampling import UniformSampling


def repeat(clip: Path, path: Path, seconds: int = 3600) -> None:
    """Write the packets of a clip again and again."""
    with av.open(str(clip)) as old, av.open(str(path), "w") as new:
        template = old.streams.video[0]
        stream = new.add_stream_from_template(template)
        packets = [packet for packet in old.demux(template) if packet.size]
        rows = [(bytes(packet), packet.pts, packet.dts, packet.is_keyframe) for packet in packets]
        length = rows[-1][2] - rows[0][2] + rows[1][2] - rows[0][2]
        for number in range(int(seconds / float(length * template.time_base)) + 1):
            for content, pts, dts, is_key in rows:
                packet = av.Packet(content)
                packet.stream, packet.time_base, packet.is_keyframe = stream, template.time_base, is_key
                packet.pts, packet.dts = pts + number * length, dts + number * length
                new.mux(packet)


def bytes_read() -> int:
    """Return the bytes that this process has read (Linux)."""
    return int(Path("/proc/self/io").read_text().split()[1])


def main() -> None:
    """Print bytes and processor seconds of both ways."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("clip", type=Path)
    clip = parser.parse_args().clip
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "hour.mp4")
        repeat(clip, path)
        frames = []
        for name, smallest in (("packets", path.stat().st_size + 1), ("index", 0)) * 2:
            probe._MIN_INDEXED = smallest
            readers._scan.cache_clear()
            before, start = bytes_read(), time.process_time()
            with readers.open_video(path) as source:
                chosen = UniformSampling(16).choose(source.frame_times())
                planned, seconds = bytes_read() - before, time.process_time() - start
                frames.append(source.read(chosen.tolist()))
            print(f"{name}: {planned / 1e6:.1f} MB of {path.stat().st_size / 1e6:.0f}, {seconds:.3f} s")
        print("frames identical:", all((frame == frames[0]).all() for frame in frames))


if __name__ == "__main__":
    main()

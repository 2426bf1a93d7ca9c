"""Containers and codecs that tests write and read back, beside the files of ``tests/video/media.tsv``."""

from __future__ import annotations

# container, file name, encoder, pixel format, size
FORMATS = [
    ("AVI", "v.avi", "mpeg4", "yuv420p", None),
    ("DV", "v.dv", "dvvideo", "yuv420p", (720, 576)),
    ("IVF", "v.ivf", "libvpx", "yuv420p", None),
    ("MP4/MOV", "v.mov", "prores_ks", "yuv422p10le", None),
    ("MP4/MOV", "v.mp4", "jpeg2000", "yuv420p", None),
    ("MPEG-PS", "v.mpg", "mpeg1video", "yuv420p", None),
    ("MPEG-TS", "v.m2ts", "mpeg2video", "yuv420p", None),
    ("MXF", "v.mxf", "mpeg2video", "yuv420p", None),
    ("Matroska/WebM", "v.mkv", "ffv1", "yuv420p", None),
    ("NUT", "v.nut", "ffv1", "yuv420p", None),
    ("RealMedia", "v.rm", "rv10", "yuv420p", (176, 144)),
    ("SWF", "v.swf", "flv", "yuv420p", None),
    ("WTV", "v.wtv", "mpeg2video", "yuv420p", None),
    ("WebP", "v.webp", "libwebp_anim", "yuv420p", None),
    ("Y4M", "v.y4m", "rawvideo", "yuv420p", None),
    ("raw AV1 (OBU)", "v.obu", "libsvtav1", "yuv420p", None),
    ("raw H.264", "v.h264", "libx264", "yuv420p", None),
    ("raw HEVC", "v.hevc", "libx265", "yuv420p", None),
    ("raw MPEG video", "v.m2v", "mpeg2video", "yuv420p", None),
]

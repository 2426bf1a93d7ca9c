"""Videos: discovery, readers, frame sampling, segmentation and worker processes."""

READER_NAMES = ("auto", "pyav", "decord")  # here, where they cost no import; see capvid.video.readers

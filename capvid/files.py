"""Files that appear whole or not at all, and the digests of files."""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_BLOCK = 1 << 20


@contextmanager
def atomic_path(path: str | Path) -> Iterator[Path]:
    """Yield a temporary name in the folder of ``path`` that takes its place when the block ends well.

    The folder is made if need be. When the block raises, the temporary file goes and whatever stood at
    ``path`` stays as it was. The temporary name begins with a dot, so that nothing picks it up.

    Raises:
        OSError: where the folder or the file cannot be written.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # the name is cut short because a name with the suffix could be longer than a file system takes
    temporary = target.with_name(f".{target.name[:60]}.{os.getpid()}-{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        temporary.replace(target)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


def atomic_write_text(path: str | Path, text: str) -> None:
    """Write ``text`` as UTF-8, with newlines as they are, replacing the file at once."""
    with atomic_path(path) as temporary:
        temporary.write_bytes(text.encode("utf-8"))


def sha256_file(path: str | Path) -> str:
    """Give the SHA-256 of a file's bytes as 64 hexadecimal digits."""
    digest = hashlib.sha256()
    with Path(path).open("rb") as stream:
        while block := stream.read(_BLOCK):
            digest.update(block)
    return digest.hexdigest()

"""What was seen at the first download of weights, kept in ``HF_HOME``: commits and digests.

Where no commit or digest is known beforehand, the first one seen is recorded, and what comes later has to
agree. A ``HF_HOME`` that cannot be written to goes without.
"""

from __future__ import annotations

import json
from contextlib import suppress
from pathlib import Path

from capvid.errors import HubError
from capvid.files import atomic_write_text, read_regular
from capvid.parsing import parse_json

_FILE = "capvid-digests.json"
_MOST_BYTES = 16 << 20


def recorded(name: str) -> str | None:
    """Give what is recorded of ``name``.

    Raises:
        HubError: the records are damaged.
    """
    return _read().get(name)


def record(name: str, value: str) -> str:
    """Record ``value`` unless something is recorded of ``name``, and give what is.

    Raises:
        HubError: the records are damaged.
    """
    from huggingface_hub.utils import WeakFileLock

    path = _path()
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        with WeakFileLock(path.with_suffix(".lock")):
            records = _read()
            if name not in records:
                records[name] = value
                atomic_write_text(path, json.dumps(records, indent=1, sort_keys=True) + "\n")
            return records[name]
    return recorded(name) or value


def _path() -> Path:
    from huggingface_hub import constants

    return Path(constants.HF_HOME) / _FILE


def _read() -> dict[str, str]:
    path = _path()
    try:
        records = parse_json(read_regular(path, max_bytes=_MOST_BYTES))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError) as error:
        raise HubError(
            f"{path}: cannot be read ({error})", remedy="delete it; digests are recorded anew"
        ) from error
    if not isinstance(records, dict) or not all(isinstance(value, str) for value in records.values()):
        raise HubError(f"{path}: not a record of digests", remedy="delete it; digests are recorded anew")
    return records

"""Small files from web servers, within a size and a time."""

from __future__ import annotations

import queue
import threading
import time
import urllib.error
import urllib.request

_BLOCK = 1 << 16


def download(url: str, *, seconds: float, max_bytes: int) -> bytes:
    """Return the file at an address; proxies are those of the environment.

    Args:
        url: ``https://`` or ``http://``.
        seconds: limit on everything together, the resolution of the host's name included.
        max_bytes: limit on the size.

    Raises:
        OSError: no connection, no such file, too large, cut short, or not complete in time.
    """
    deadline = time.monotonic() + seconds
    outcome: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def read() -> bytes:
        data = bytearray()
        with urllib.request.urlopen(url, timeout=seconds) as response:
            length = int(response.headers.get("Content-Length") or -1)
            while len(data) <= max_bytes >= length and (block := response.read1(_BLOCK)):
                data += block
                if time.monotonic() > deadline:
                    raise TimeoutError
        if max(len(data), length) > max_bytes:
            raise OSError(f"larger than {max_bytes} bytes")
        if length not in (-1, len(data)):
            raise OSError(f"{len(data)} bytes came of {length}")
        return bytes(data)

    def work() -> None:
        try:
            outcome.put(read())
        except Exception as error:  # http.client has errors of its own
            outcome.put(error)

    # in a thread of its own, which nothing waits for: no timeout applies to the resolution of a name
    threading.Thread(target=work, name="capvid-download", daemon=True).start()
    try:
        result = outcome.get(timeout=seconds)
    except queue.Empty:
        result = TimeoutError()
    if isinstance(result, bytes):
        return result
    reason = result.reason if type(result) is urllib.error.URLError else result
    if isinstance(reason, TimeoutError):
        reason = f"not complete within {seconds:.3g} seconds"
    raise OSError(" ".join(str(reason).split()) or type(result).__name__) from result

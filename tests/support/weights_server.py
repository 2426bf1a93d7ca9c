"""A web server of weights on the loopback interface, which can fail in many ways."""

from __future__ import annotations

import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class WeightsServer:
    """Serves ``files`` by name.

    Attributes:
        requests: names asked for.
        fault: ``hang`` never answers, ``drip`` sends a byte every 50 ms, ``cut`` breaks off in the middle,
            ``endless`` sends for ever without a length; nothing else fails.
    """

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.fault = ""
        self._end = threading.Event()
        owner = self

        class Handler(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                name = self.path.lstrip("/")
                owner.requests.append(name)
                content = owner.files.get(name)
                if owner.fault == "hang":
                    owner._end.wait(60)
                    return
                self.send_response(404 if content is None else 200)
                if owner.fault != "endless":
                    self.send_header("Content-Length", str(len(content or b"")))
                self.end_headers()
                content = content or b""
                if owner.fault == "cut":
                    content = content[: len(content) // 2]
                try:
                    while owner.fault == "endless" and not owner._end.is_set():
                        self.wfile.write(bytes(1 << 20))
                    while owner.fault == "drip" and content and not owner._end.is_set():
                        self.wfile.write(content[:1])
                        content = content[1:]
                        time.sleep(0.05)
                    self.wfile.write(content)
                except OSError:  # nobody listens any more
                    pass

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        threading.Thread(target=self._server.serve_forever, daemon=True).start()

    def close(self) -> None:
        """Stop serving."""
        self._end.set()
        self._server.shutdown()
        self._server.server_close()

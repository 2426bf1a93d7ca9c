"""A local S3-compatible server behind a proxy that fails intermittently."""

from __future__ import annotations

import http.client
import logging
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import quote

KEY, SECRET = "the-right-key", "the-right-secret"
_REFUSED = (
    b'<?xml version="1.0"?><Error><Code>InvalidAccessKeyId</Code>'
    b"<Message>The AWS Access Key Id you provided does not exist in our records.</Message></Error>"
)
_HOP_BY_HOP = {
    "connection",
    "transfer-encoding",
    "keep-alive",
    "te",
    "upgrade",
}  # headers that concern a single connection


class FlakyS3:
    """The server behind a proxy.

    Attributes:
        url: address of the proxy.
        every: every n-th request fails with status 500 or 503 in turn; 0 disables failures.
        cut: every n-th download is cut off in the middle; 0 disables cuts.
        requests: number of requests received.
        failed: number of requests that failed or were cut off.
    """

    def __init__(self) -> None:
        from moto.server import ThreadedMotoServer

        self.every = self.cut = 0
        self.requests = self.downloads = self.failed = 0
        self._moto = ThreadedMotoServer("127.0.0.1", port=0, verbose=False)
        self._moto.start()
        logging.getLogger("werkzeug").setLevel(logging.ERROR)
        self.target = self._moto.get_host_and_port()
        self._lock = threading.Lock()
        server = self

        class Handler(_Handler):
            pass

        Handler.s3 = server
        self._proxy = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._proxy.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._proxy.server_port}"
        threading.Thread(target=self._proxy.serve_forever, daemon=True).start()

    def environment(self) -> dict[str, str]:
        """Return the variables that S3 libraries read."""
        return {
            "AWS_ACCESS_KEY_ID": KEY,
            "AWS_SECRET_ACCESS_KEY": SECRET,
            "AWS_ENDPOINT_URL": self.url,
            "AWS_DEFAULT_REGION": "us-east-1",
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def failure_status(self) -> int:
        """Count a request; return the status to fail it with, or 0."""
        with self._lock:
            self.requests += 1
            if self.every and self.requests % self.every == 0:
                self.failed += 1
                return 500 if self.failed % 2 else 503
        return 0

    def cuts_off(self) -> bool:
        """Count a download; return whether to cut it off."""
        with self._lock:
            self.downloads += 1
            cut_off = bool(self.cut) and self.downloads % self.cut == 0
            self.failed += cut_off
        return cut_off

    def ask(self, method: str, path: str, body: bytes | None = None) -> bytes:
        """Send a request to the server itself, which never fails."""
        connection = http.client.HTTPConnection(*self.target, timeout=60)
        try:
            connection.request(method, quote(path), body, {"Authorization": _signature(KEY)})
            answer = connection.getresponse()
            assert answer.status < 300, (method, path, answer.status, answer.read())
            return answer.read()
        finally:
            connection.close()

    def names(self, bucket: str, prefix: str) -> list[str]:
        """Return the names of the objects with a prefix."""
        import re
        from html import unescape

        listing = self.ask("GET", f"/{bucket}").decode()
        return [
            name for name in map(unescape, re.findall("<Key>(.*?)</Key>", listing)) if name.startswith(prefix)
        ]

    def close(self) -> None:
        """Stop the proxy and the server."""
        self._proxy.shutdown()
        self._proxy.server_close()
        self._moto.stop()


class _Handler(BaseHTTPRequestHandler):
    s3: FlakyS3
    protocol_version = "HTTP/1.1"

    def _forward(self) -> None:
        body = b"".join(self._body())
        status = self.s3.failure_status()
        if status:
            self._answer(status, {"Content-Length": "0"}, b"")
            return
        if f"Credential={KEY}/" not in self.headers.get("Authorization", ""):
            self._answer(
                403, {"Content-Type": "application/xml", "Content-Length": str(len(_REFUSED))}, _REFUSED
            )
            return
        connection = http.client.HTTPConnection(*self.s3.target, timeout=60)
        try:
            headers = {name: text for name, text in self.headers.items() if name.lower() not in _HOP_BY_HOP}
            headers.pop("Content-Length", None)
            if self.command in ("POST", "PUT"):
                headers["Content-Length"] = str(len(body))
            connection.request(self.command, self.path, body, headers)
            answer = connection.getresponse()
            content = answer.read()
            response_headers = {
                name: text for name, text in answer.getheaders() if name.lower() not in _HOP_BY_HOP
            }
            if self.command != "HEAD":
                response_headers["Content-Length"] = str(len(content))
        finally:
            connection.close()
        self._answer(answer.status, response_headers, content)

    do_GET = do_HEAD = do_PUT = do_POST = do_DELETE = _forward  # noqa: N815

    def _body(self) -> Iterator[bytes]:
        if self.headers.get("Transfer-Encoding", "").lower() == "chunked":
            while size := int(self.rfile.readline().split(b";")[0], 16):
                yield self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
        elif length := int(self.headers.get("Content-Length", 0)):
            yield self.rfile.read(length)

    def _answer(self, status: int, headers: dict[str, str], body: bytes) -> None:
        self.send_response_only(status)
        for name, text in headers.items():
            self.send_header(name, text)
        self.end_headers()
        if self.command == "GET" and len(body) > 1 and status < 300 and self.s3.cuts_off():
            self.wfile.write(body[: len(body) // 2])
            self.close_connection = True
        elif self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, *args: object) -> None:
        pass


def _signature(key: str) -> str:
    scope = f"{key}/20200101/us-east-1/s3/aws4_request"
    return f"AWS4-HMAC-SHA256 Credential={scope}, SignedHeaders=host, Signature=0"

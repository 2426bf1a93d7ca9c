"""A stub of an OpenAI-compatible server that misbehaves on request."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

Misbehaviour = Callable[["_Handler", dict[str, Any]], bool]  # whether the request has been dealt with


class ChatServer:
    """Answers with the number of images and the prompt of a request.

    Attributes:
        bodies: bodies of the chat completions.
        headers: headers of all requests.
        misbehave: what to do instead of answering; called for each request.
        delay: seconds before an answer.
        logprobs: whether answers contain log-probabilities.
        models: the list of models.
        most: largest number of requests that were answered at the same time.
    """

    def __init__(self) -> None:
        self.bodies: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.misbehave: Misbehaviour = lambda handler, body: False
        self.delay = 0.0
        self.logprobs = True
        self.models: Any = [{"id": "toy-vlm"}]
        self.most = self.active = 0
        self.lock = threading.Lock()
        server = self

        class Handler(_Handler):
            chat = server

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self.server.server_port}/v1"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()


class _Handler(BaseHTTPRequestHandler):
    chat: ChatServer

    def do_GET(self) -> None:
        self.chat.headers.append(dict(self.headers))
        self.answer({"data": self.chat.models} if self.path == "/v1/models" else {}, 200)

    def do_POST(self) -> None:
        chat = self.chat
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        with chat.lock:
            chat.headers.append(dict(self.headers))
            chat.bodies.append(body)
            chat.active += 1
            chat.most = max(chat.most, chat.active)
        try:
            time.sleep(chat.delay)
            if not chat.misbehave(self, body):
                self.answer({"choices": [self.choice(body) for _ in range(body.get("n", 1))]}, 200)
        finally:
            with chat.lock:
                chat.active -= 1

    def choice(self, body: dict[str, Any]) -> dict[str, Any]:
        tokens = [f"{images(body)}", " images", " seen", "."]
        choice: dict[str, Any] = {"message": {"role": "assistant", "content": "".join(tokens)}}
        if self.chat.logprobs:
            choice["logprobs"] = {
                "content": [{"token": token, "logprob": -0.25 * n} for n, token in enumerate(tokens)]
            }
        return choice

    def answer(self, value: Any, status: int, **headers: str) -> None:
        self.send(json.dumps(value).encode(), status, **headers)

    def send(self, data: bytes, status: int, **headers: str) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(data)))
        for name, text in headers.items():
            self.send_header(name.replace("_", "-"), text)
        with suppress(OSError):  # the client may be gone
            self.end_headers()
            self.wfile.write(data)

    def log_message(self, *arguments: Any) -> None:
        pass


def parts(body: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the parts of the user's message."""
    content: list[dict[str, Any]] = body["messages"][-1]["content"]
    return content


def images(body: dict[str, Any]) -> int:
    """Return the number of images in a request."""
    return sum(part["type"] == "image_url" for part in parts(body))


def prompt(body: dict[str, Any]) -> str:
    """Return the text of the prompt."""
    text: str = parts(body)[-1]["text"]
    return text

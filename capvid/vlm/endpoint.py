"""Chat models behind an OpenAI-compatible endpoint (vLLM, llama-server, Ollama, LM Studio).

Frames are sent as JPEG images, each after a line with its time. Requests that may succeed later are retried.
"""

from __future__ import annotations

import base64
import email.utils
import json
import math
import os
import queue
import random
import re
import textwrap
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Mapping, Sequence
from email.message import Message
from http.client import HTTPException, HTTPResponse
from types import MappingProxyType
from typing import Any

import torch

from capvid.decoding.caption_generator import Caption, Clip, WordScore
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import CapvidError, RunError, UsageError
from capvid.features.prefetch import encode_jpegs
from capvid.utils.validation import MIB, parse_json

KEY = "CAPVID_API_KEY"  # environment variable with the key of the endpoint
TRIES = 6
PAUSE = 1.0  # seconds before the second try, doubled before each further try
_MAX_PAUSE = 300.0  # seconds that a server may ask to wait
_MAX_ANSWER = 64 * MIB
_MAX_REASON = 200  # characters of a server's message
_TRANSIENT = (408, 409, 425, 429)  # like all statuses from 500
_FATAL = (401, 403, 404)  # statuses that concern every request
_ADDRESS = re.compile(
    r"https?://(?P<host>(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?)(?:/[\w./~%-]*)?",
    re.I | re.A,
)


class EndpointError(CapvidError):
    """A request that the endpoint refused, or did not answer."""

    kind = "endpoint"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """Refuse redirects, which would take the key to another server."""

    def redirect_request(self, *arguments: Any) -> None:
        """Return no new request."""


class ServedModel:
    """A chat model at a server.

    Args:
        url: address of the API, such as ``http://localhost:8000/v1``.
        model: name of the model; None takes the first one that the server lists.
        timeout: seconds for one request; None allows ten minutes.

    Raises:
        UsageError: ``url`` is not an HTTP address, or no header can hold the key.
        RunError: the server cannot be reached, or lists no model.
    """

    device = torch.device("cpu")
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, url: str, model: str | None = None, *, timeout: float | None = None) -> None:
        match = _ADDRESS.fullmatch(url)
        if match is None or int(match["port"] or 0) > 65535:
            problem = f"{url.rpartition('@')[2]}: not the address of an endpoint"  # without a password
            raise UsageError(problem, remedy=f"use http://HOST:PORT/v1, and {KEY} for a key")
        _api_key()
        self.host = match["host"]
        self._url = url.rstrip("/")
        self._timeout = timeout or 600.0
        self.model = model or self._first_model()

    @property
    def label(self) -> str:
        """Name of the model and its host, for results."""
        return f"{self.model}@{self.host}"

    def check(self, options: DecodingOptions) -> None:
        """Raise UsageError for an option that the API does not have."""
        for name, expected in (("beam_size", 1), ("min_length", 0), ("no_repeat_ngram", 0)):
            if getattr(options, name) != expected:
                raise UsageError(f"endpoints do not support {name}", remedy="leave it out")

    def on(self, device: torch.device | str) -> ServedModel:
        """Return this model, which computes elsewhere."""
        return self

    def generate(
        self, clips: Sequence[Clip], prompts: Sequence[str], options: DecodingOptions, *, system: str = ""
    ) -> list[tuple[Caption, ...] | Exception]:
        """Caption clips by concurrent requests; return the captions or the error of each clip.

        Raises:
            RunError: the server refuses the key or the model.
        """
        answers: list[tuple[Caption, ...] | Exception] = [EndpointError("not answered")] * len(clips)
        finished: queue.SimpleQueue[int] = queue.SimpleQueue()

        def run(index: int) -> None:
            try:
                body = self._body(clips[index], prompts[index], options, system)
                answers[index] = self._captions(self._request("chat/completions", body))
            except Exception as error:
                answers[index] = error
            finished.put(index)

        for index in range(len(clips)):  # daemon threads, so that Ctrl-C does not wait for answers
            threading.Thread(target=run, args=(index,), daemon=True).start()
        for _ in clips:
            answer = answers[finished.get()]
            if isinstance(answer, RunError):
                raise answer
        return answers

    def _first_model(self) -> str:
        """Return the first model that the server lists."""
        try:
            models = self._request("models", None)["data"]
            return str(models[0]["id"])
        except EndpointError as error:
            raise RunError(error.message, remedy=error.remedy) from error
        except (KeyError, IndexError, TypeError) as error:
            problem = f"{self.host}: the endpoint lists no models"
            raise RunError(problem, remedy="name the model with --model") from error

    def _body(self, clip: Clip, prompt: str, options: DecodingOptions, system: str) -> dict[str, Any]:
        """Return the body of a request."""
        content: list[dict[str, Any]] = []
        times = [None] * len(clip.frames) if clip.times is None else (clip.times - clip.start).tolist()
        for seconds, jpeg in zip(times, encode_jpegs(clip.frames, quality=90), strict=True):
            if seconds is not None:
                content.append({"type": "text", "text": f"Frame at {seconds:.1f} s:"})
            data = base64.b64encode(jpeg).decode()
            content.append({"type": "image_url", "image_url": {"url": f"data:image/jpeg;base64,{data}"}})
        messages: list[dict[str, Any]] = [
            {"role": "user", "content": [*content, {"type": "text", "text": prompt}]}
        ]
        if system:
            messages.insert(0, {"role": "system", "content": system})
        return {
            "model": self.model,
            "messages": messages,
            "max_tokens": options.max_length,
            "temperature": options.temperature,
            "top_p": options.top_p,
            "seed": options.seed,
            "n": options.num_captions,
            "logprobs": True,
        }

    def _captions(self, answer: Any) -> tuple[Caption, ...]:
        """Return the captions in an answer, likeliest first."""
        try:
            captions = [_caption(choice) for choice in answer["choices"]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{self.host}: the answer is not a chat completion ({type(error).__name__}: {error})"
            raise EndpointError(problem, remedy="check --endpoint") from error
        if not captions:
            raise EndpointError(f"{self.host}: the answer has no choices", remedy="check --endpoint")
        return tuple(sorted(captions, key=lambda caption: -caption.logprob))

    def _request(self, path: str, body: dict[str, Any] | None) -> Any:
        """Send a request, with further tries, and return the JSON value of the answer.

        Raises:
            EndpointError: the request was refused, or every try failed.
            RunError: the server refuses the key or the model.
        """
        headers = {"Content-Type": "application/json", "Accept": "application/json"}
        if key := _api_key():
            headers["Authorization"] = f"Bearer {key}"
        data = None if body is None else json.dumps(body).encode()
        opener = urllib.request.build_opener(_NoRedirect)
        for number in range(1, TRIES + 1):
            deadline = time.monotonic() + self._timeout
            pause = PAUSE * 2 ** (number - 1) * random.uniform(0.5, 1)
            try:
                request = urllib.request.Request(f"{self._url}/{path}", data, headers)
                with opener.open(request, timeout=self._timeout) as response:
                    return parse_json(_read(response, deadline).decode("utf-8"))
            except urllib.error.HTTPError as error:
                with error:
                    reason = _reason(error)
                problem = f"{self.host}: HTTP status {error.code}{reason}"
                if error.code in _FATAL:
                    remedy = f"check --endpoint, --model and the key in {KEY}"
                    raise RunError(problem, remedy=remedy) from error
                if error.code < 500 and error.code not in _TRANSIENT:
                    remedy = "check the options; fewer frames (--max-frames) make smaller requests"
                    raise EndpointError(problem, remedy=remedy) from error
                pause = _retry_after(error.headers, pause)
                cause: Exception = error
            except (OSError, HTTPException, ValueError) as error:
                failure = textwrap.shorten(str(getattr(error, "reason", None) or error), _MAX_REASON)
                problem, cause = f"{self.host}: no valid answer ({failure})", error
            if number < TRIES:
                time.sleep(pause)
        raise EndpointError(problem, remedy=f"check that the server runs; tried {TRIES} times") from cause


def _api_key() -> str:
    """Return the key of the endpoint; raise UsageError, which does not show it, if no header can hold it."""
    key = os.environ.get(KEY, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise UsageError(f"{KEY}: this is no key", remedy="set it to visible ASCII characters without spaces")
    return key


def _read(response: HTTPResponse, deadline: float) -> bytes:
    """Return the body of an answer.

    Raises:
        TimeoutError: it takes until ``deadline``, however steadily it comes.
        ValueError: it is too large.
    """
    body = bytearray()
    while part := response.read1(MIB):
        body += part
        if len(body) > _MAX_ANSWER:
            raise ValueError("the answer is too large")
        if time.monotonic() > deadline:
            raise TimeoutError("the answer takes too long")
    return bytes(body)


def _reason(error: urllib.error.HTTPError) -> str:
    """Return the server's message in parentheses, if there is one."""
    try:
        value = parse_json(error.read(MIB).decode("utf-8"))
        message = value.get("error", value)
        message = message.get("message", "") if isinstance(message, dict) else message
        return f" ({textwrap.shorten(str(message), _MAX_REASON)})" if message else ""
    except (OSError, HTTPException, ValueError, AttributeError):
        return ""


def _retry_after(headers: Message, pause: float) -> float:
    """Return the seconds to wait by the header Retry-After, seconds or a date; ``pause`` without it."""
    text = headers.get("Retry-After", "")
    try:
        date = email.utils.parsedate_tz(text)
        seconds = float(text) if date is None else email.utils.mktime_tz(date) - time.time()
    except (ValueError, OverflowError):
        return pause
    return min(max(seconds, 0.0), _MAX_PAUSE) if math.isfinite(seconds) else pause


def _caption(choice: Any) -> Caption:
    """Return the caption of one choice; log-probabilities that the server does not send are NaN."""
    content = choice["message"]["content"]
    if not isinstance(content, str | None):
        raise TypeError("its content is no text")
    words = (content or "").split()
    scores, total = [math.nan] * len(words), math.nan
    tokens = (choice.get("logprobs") or {}).get("content") or []
    logprobs = [float(token["logprob"]) for token in tokens]
    if logprobs and all(map(math.isfinite, logprobs)):
        total = sum(logprobs)
        text = ""
        if words and "".join(str(token["token"]) for token in tokens).split() == words:
            scores = [0.0] * len(words)
            for token, logprob in zip(tokens, logprobs, strict=True):
                text += str(token["token"])  # a token belongs to the last word that it ends in
                scores[max(len(text.split()), 1) - 1] += logprob
    scored = [WordScore(word=word, logprob=score) for word, score in zip(words, scores, strict=True)]
    return Caption(text=" ".join(words), logprob=total, words=tuple(scored))

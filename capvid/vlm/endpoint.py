"""Chat models behind an OpenAI-compatible endpoint (vLLM, llama-server, Ollama, LM Studio).

Frames are sent as JPEG images, each after a line with its time. Requests that may succeed later are retried;
what no request will survive, such as a wrong key or a server that does not run, ends the run.
"""

from __future__ import annotations

import asyncio
import base64
import email.utils
import ipaddress
import json
import logging
import math
import os
import random
import re
import ssl
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate
from types import MappingProxyType
from typing import Any
from urllib.parse import urlsplit

import httpx2
import torch
from anyio.from_thread import start_blocking_portal

from capvid.decoding.caption_generator import Caption, Clip
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import AnswerError, CapvidError, RunError, UsageError
from capvid.features.prefetch import encode_jpegs
from capvid.utils.validation import MIB, parse_json
from capvid.version import __version__
from capvid.vlm.answers import Reply, captions_of, ranked

KEY = "CAPVID_API_KEY"  # environment variable with the key of the endpoint
TRIES = 6
PAUSE = 1.0  # seconds before the second try, doubled before each further try
_LONG_PAUSE = 10.0  # seconds that are worth a note
_MAX_ANSWER = 64 * MIB
_MAX_REASON = 200  # characters of a server's message
_SECRET = 6  # characters; a shorter key is a placeholder such as EMPTY, which may well be a word of a caption
_TRANSIENT = (408, 409, 425, 429)  # like all statuses from 500
_FATAL = (401, 402, 403, 404, 405, 407, 410)  # statuses that concern every request
_ADDRESS = re.compile(
    r"https?://(?P<host>(?:\[[0-9a-f:.]+\]|[a-z0-9_.-]+)(?::(?P<port>[0-9]{1,5}))?)(?:/[\w./~%-]*)?",
    re.I | re.A,
)
_CREDIT = re.compile(r"insufficient_(?:quota|balance|credits)|billing_hard_limit|billing_not_active")
_FILTERED = re.compile(
    r"content_(?:filter|policy|moderation)|ResponsibleAI|data_?inspection|flagged|PROHIBITED_CONTENT", re.I
)
_TOO_LONG = re.compile(r"context.(?:length|window|size)|too (?:large|long|many)|exceed", re.I)
_UNSUPPORTED = re.compile(
    r"unsupported|not? support|un(?:recogni[sz]ed|known|expected)|not (?:permitted|allowed)|extra", re.I
)
# how messages name the fields of a request that a server may refuse
_FIELDS = {
    **{
        name: re.compile(rf"\b{name}\b")
        for name in ("max_tokens", "temperature", "top_p", "seed", "logprobs")
    },
    "n": re.compile(
        r"""["'`]n["'`]|\bn ?[=:><]|\bn (?:must|is|should|param)|(?:param\w*|fields?|body)[:. ]+n\b"""
    ),
}
_MESSAGE = ("error", "errors", "detail", "message", "msg", "reason", "title", "code", "type")  # in this order


class EndpointError(CapvidError):
    """A request that the endpoint refused, or did not answer."""

    kind = "endpoint"


class _RefusedError(EndpointError):
    """A request that is not worth another try; ``words`` is what the server said about it."""

    def __init__(self, message: str, *, remedy: str, words: str) -> None:
        super().__init__(message, remedy=remedy)
        self.words = words


class _TransientError(Exception):
    """A failure that another try may overcome.

    Args:
        message: what happened.
        pause: seconds that the server asks to wait; None if it does not say.
        unreachable: whether there was no connection to the server.
    """

    def __init__(self, message: str, *, pause: float | None = None, unreachable: bool = False) -> None:
        super().__init__(message)
        self.message, self.pause, self.unreachable = message, pause, unreachable


class ServedModel:
    """A chat model at a server.

    Args:
        url: address of the API, such as ``http://localhost:8000/v1``.
        model: name of the model; None takes the first one that the server lists.
        timeout: seconds for the answer to one request, with all tries; None allows ten minutes.

    Raises:
        UsageError: ``url`` is not an HTTP address, no header can hold the key, or the proxy cannot be used.
        RunError: the server cannot be reached, or lists no model.
    """

    device = torch.device("cpu")
    settings: Mapping[str, Any] = MappingProxyType({})

    def __init__(self, url: str, model: str | None = None, *, timeout: float | None = None) -> None:
        match = _ADDRESS.fullmatch(url)
        try:
            if match is None or int(match["port"] or 0) > 65535:
                raise ValueError("not an address")
            httpx2.URL(url)
            proxy = _proxy(url)
        except (ValueError, httpx2.InvalidURL) as error:
            problem = f"{url.rpartition('@')[2]}: not the address of an endpoint"  # without a password
            raise UsageError(problem, remedy=f"use http://HOST:PORT/v1, and {KEY} for a key") from error
        _api_key()
        self.host = match["host"]
        self._url = url.rstrip("/")
        self._timeout = timeout or 600.0
        self._proxy = proxy
        way = "" if proxy is None else f" (by the proxy {proxy.rpartition('@')[2]})"
        self._server = f"{self.host}{way}"  # for messages
        self._answered = False  # whether there was any answer, so that the server exists
        self._renamed: dict[str, str] = {}  # fields that the server refuses: another name, or none to drop it
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
            RunError: no request will succeed: the server does not run, or refuses the key or the model.
        """

        async def caption(client: httpx2.AsyncClient, clip: Clip, prompt: str) -> Any:
            try:
                body = await asyncio.to_thread(self._body, clip, prompt, options, system)
                return self._captions(await self._complete(client, body), options)
            except RunError:
                raise
            except Exception as error:
                return error

        async def caption_all() -> list[Any]:
            async with self._client() as client:
                tasks = [
                    asyncio.ensure_future(caption(client, *each)) for each in zip(clips, prompts, strict=True)
                ]
                try:
                    return await asyncio.gather(*tasks)
                finally:
                    for task in tasks:
                        task.cancel()

        with start_blocking_portal() as portal:  # the caller, such as a notebook, may run an event loop
            return portal.call(caption_all)

    def _first_model(self) -> str:
        """Return the first model that the server lists."""

        async def list_models() -> Any:
            async with self._client() as client:
                return await self._request(client, "models", None, MIB)

        try:
            with start_blocking_portal() as portal:
                name = portal.call(list_models)["data"][0]["id"]
            if not isinstance(name, str) or not name:
                raise TypeError("a model without a name")
            return self._masked(name)
        except EndpointError as error:
            raise RunError(error.message, remedy=error.remedy) from error
        except (KeyError, IndexError, TypeError) as error:
            problem = f"{self._server}: the endpoint lists no models"
            raise RunError(problem, remedy="name the model with --model") from error

    def _client(self) -> httpx2.AsyncClient:
        """Return a client that follows no redirects, which would take the key to another server."""
        headers = {"Accept": "application/json", "Accept-Encoding": "identity"}
        headers |= {"Content-Type": "application/json", "User-Agent": f"capvid/{__version__}"}
        if key := _api_key():
            headers["Authorization"] = f"Bearer {key}"
        try:
            return httpx2.AsyncClient(
                headers=headers,
                verify=ssl.create_default_context(),
                proxy=self._proxy,
                trust_env=False,
                timeout=None,  # each request has a deadline
                limits=httpx2.Limits(max_connections=None),
            )
        except (ValueError, ImportError, httpx2.InvalidURL) as error:
            problem = f"{self._server}: cannot be used ({self._short(error)})"
            raise UsageError(
                problem, remedy="set http_proxy to http://HOST:PORT, or no_proxy to the host"
            ) from error

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

    def _captions(self, answer: Any, options: DecodingOptions) -> tuple[Caption, ...]:
        """Return the captions in an answer, likeliest first.

        Raises:
            AnswerError: none of its choices is a caption.
            EndpointError: it is not a chat completion.
        """
        try:
            replies = [_reply(choice, self._masked) for choice in answer["choices"][: options.num_captions]]
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{self._server}: the answer is not a chat completion ({self._short(error)})"
            raise EndpointError(problem, remedy="check --endpoint") from error
        if not replies:
            raise EndpointError(f"{self._server}: the answer has no choices", remedy="check --endpoint")
        return ranked(captions_of(replies, max_length=options.max_length))

    async def _complete(self, client: httpx2.AsyncClient, body: dict[str, Any]) -> Any:
        """Return the answer to a request, without the fields that the server refuses."""
        limit = min(4 * MIB + body["n"] * body["max_tokens"] * 1024, _MAX_ANSWER)  # 1 KiB for each token
        renamed = dict(self._renamed)
        while True:
            changed = {
                renamed.get(name, name): value for name, value in body.items() if renamed.get(name, name)
            }
            try:
                answer = await self._request(client, "chat/completions", json.dumps(changed).encode(), limit)
                break
            except _RefusedError as error:
                name = _refused_field(error.words, changed)
                if name == "n" and body["n"] > 1:
                    remedy = "the server gives one caption per video; leave out --num-captions"
                    raise RunError(error.message, remedy=remedy) from error
                if not name:
                    raise
                renamed[name] = "max_completion_tokens" if name == "max_tokens" else ""
        for name in renamed.keys() - self._renamed.keys():
            instead = f"; sending {renamed[name]}" if renamed[name] else "; continuing without it"
            self._note(f"note: {self._server} refuses {name}{instead}")
        self._renamed |= renamed
        return answer

    async def _request(self, client: httpx2.AsyncClient, path: str, data: bytes | None, limit: int) -> Any:
        """Send a request, with further tries, and return the JSON value of the answer.

        Raises:
            EndpointError: the request was refused, or had no answer in time or after all tries.
            AnswerError: a filter of the server blocked it.
            RunError: no request will succeed.
        """
        deadline = time.monotonic() + self._timeout
        late = f"no answer within --timeout {self._timeout:g} s"
        failure = _TransientError(f"{self._server}: {late}")
        for number in range(1, TRIES + 1):
            try:
                exchange = self._exchange(client, path, data, limit)
                return await asyncio.wait_for(exchange, deadline - time.monotonic())
            except _TransientError as error:
                failure = error
            except (TimeoutError, asyncio.TimeoutError) as error:  # two classes in Python 3.10
                earlier = f" (before: {failure.message})" if number > 1 else ""
                problem = f"{self._server}: {late}{earlier}"
                raise EndpointError(problem, remedy="raise --timeout, or check the server") from error
            if failure.unreachable and not self._answered:
                break
            asked = failure.pause or 0.0
            if asked > self._timeout:
                problem = f"{failure.message}; the server asks to wait {asked:.0f} s"
                raise RunError(problem, remedy="run the command again then, or with a longer --timeout")
            pause = asked or PAUSE * 2 ** (number - 1) * random.uniform(0.5, 1)
            if number == TRIES or time.monotonic() + pause > deadline:
                break
            if asked > _LONG_PAUSE:
                self._note(f"note: {failure.message}; waiting {asked:.0f} s, as the server asks")
            await asyncio.sleep(pause)
        if failure.unreachable:
            raise RunError(failure.message, remedy="start the server, or check --endpoint")
        times = "once" if number == 1 else f"{number} times"
        raise EndpointError(failure.message, remedy=f"check that the server runs; tried {times}")

    async def _exchange(self, client: httpx2.AsyncClient, path: str, data: bytes | None, limit: int) -> Any:
        """Send one request and return the JSON value of the answer.

        Raises:
            _TransientError: it may succeed later.
            EndpointError, AnswerError, RunError: see :meth:`_request`.
        """
        body = bytearray()
        try:
            method = "GET" if data is None else "POST"
            async with client.stream(method, f"{self._url}/{path}", content=data) as response:
                self._answered = True
                async for part in response.aiter_raw():
                    body += part
                    if len(body) > limit:
                        problem = f"{self._server}: the answer is too large, more than {limit} bytes"
                        raise EndpointError(problem, remedy="check --endpoint and --model")
        except httpx2.ConnectError as error:
            cause = _root(error)
            problem = f"{self._server}: no valid answer ({self._short(cause)})"
            if isinstance(cause, ssl.SSLError):
                remedy = (
                    "set SSL_CERT_FILE to the certificate of its authority, or use http:// if it has none"
                )
                raise RunError(problem, remedy=remedy) from error
            raise _TransientError(problem, unreachable=True) from error
        except httpx2.ProxyError as error:
            problem = f"{self._server}: the proxy refuses ({self._short(error)})"
            raise RunError(problem, remedy="check http_proxy and https_proxy, or set no_proxy") from error
        except httpx2.HTTPError as error:
            problem = f"{self._server}: no valid answer ({self._short(_root(error))})"
            raise _TransientError(problem) from error
        return self._value(response, bytes(body))

    def _value(self, response: httpx2.Response, body: bytes) -> Any:
        """Return the JSON value of an answer, or raise what its status and its message mean."""
        status, head = response.status_code, body[: 64 * 1024].decode(errors="replace")
        is_html = re.match(r"\s*<(?:!doctype|html|head|body)", head, re.I) is not None
        try:
            value, words = parse_json(body.decode("utf-8")), ""
            failed = isinstance(value, dict) and bool(value.get("error"))
            if failed and 200 <= status < 300 and isinstance(value["error"], dict):
                code = value["error"].get("code")
                status = code if isinstance(code, int) and 400 <= code < 600 else status
            words = _message(value)
        except ValueError as error:
            failed, words = True, head.strip()
            if is_html:
                title = re.search(r"<title>([^<]*)", head, re.I)
                words = title[1] if title else ""
            if status == 200 and not is_html:
                problem = f"{self._server}: no valid answer ({self._short(error)})"
                raise _TransientError(problem) from error
        if 200 <= status < 300 and not failed:
            return value
        reason = f" ({short})" if (short := self._short(words)) else ""
        problem = f"{self._server}: HTTP status {status}{reason}"
        if 300 <= status < 400:
            address = self._short(response.headers.get("Location", "another address"))
            raise RunError(
                f"{problem}: redirected to {address}", remedy="give the final address as --endpoint"
            )
        if status == 200 and is_html:
            raise RunError(
                f"{self._server}: a web page, not an API{reason}", remedy="--endpoint often ends in /v1"
            )
        if _CREDIT.search(head):
            raise RunError(problem, remedy="check the plan and the billing of the account")
        if status in (400, 403) and _FILTERED.search(head):
            problem = f"a filter of the server blocked the request{reason}"
            raise AnswerError("blocked", problem, remedy="use another model or --prompt for this video")
        if status in _FATAL:
            raise RunError(problem, remedy=f"check --endpoint, --model and the key in {KEY}")
        unsupported = _UNSUPPORTED.search(words) and _refused_field(words, _FIELDS)
        if status in _TRANSIENT or (status >= 500 and not unsupported):
            raise _TransientError(problem, pause=_retry_after(response.headers))
        remedy = "see what the server says; check --model and the options"
        if status == 413 or _TOO_LONG.search(words):
            remedy = "fewer frames (--max-frames) or smaller ones (--max-pixels) make smaller requests"
        raise _RefusedError(problem, remedy=remedy, words=words)

    def _masked(self, text: str) -> str:
        """Return a text from outside without the key."""
        key = _api_key()
        return text.replace(key, "***") if len(key) >= _SECRET else text

    def _short(self, words: str | BaseException) -> str:
        """Return a text or the reason of an exception for a message: one short line without the key."""
        if isinstance(words, OSError) and words.strerror:
            known = isinstance(words, ConnectionError | TimeoutError) and words.errno
            words = os.strerror(words.errno) if known else words.strerror  # type: ignore[arg-type]
        elif isinstance(words, BaseException):
            words = f"{type(words).__name__}: {words}"
        line = " ".join(self._masked(words[: 100 * _MAX_REASON]).split())
        return line if len(line) <= _MAX_REASON else f"{line[:_MAX_REASON]}..."

    def _note(self, line: str) -> None:
        logging.getLogger("capvid").warning("%s", line)


def _api_key() -> str:
    """Return the key of the endpoint; raise UsageError, which does not show it, if no header can hold it."""
    key = os.environ.get(KEY, "").strip()
    if not re.fullmatch(r"[!-~]*", key):
        raise UsageError(f"{KEY}: this is no key", remedy="set it to visible ASCII characters without spaces")
    return key


def _proxy(url: str) -> str | None:
    """Return the address of the proxy that the environment sets for ``url``; None for this machine."""
    parts = urlsplit(url)
    host = parts.hostname or ""
    try:
        address = ipaddress.ip_address(host)
        here = address.is_loopback or address.is_unspecified
    except ValueError:
        here = host == "localhost" or host.endswith(".localhost")
    if here or urllib.request.proxy_bypass(parts.netloc):
        return None
    proxies = urllib.request.getproxies()
    proxy = proxies.get(parts.scheme) or proxies.get("all")
    return proxy if not proxy or "://" in proxy else f"http://{proxy}"


def _root(error: BaseException) -> BaseException:
    """Return the first cause of an error of the HTTP client."""
    while True:
        several = getattr(error, "exceptions", None)  # of an attempt at each address of a host
        cause = several[0] if several else error.__cause__ or error.__context__
        if cause is None:
            return error
        error = cause


def _message(value: Any, depth: int = 6) -> str:
    """Return the message in the body of an error, in any of the forms that servers use."""
    if isinstance(value, str) or not depth:
        return str(value) if isinstance(value, str) else ""
    if isinstance(value, list):
        return "; ".join(filter(None, [_message(item, depth - 1) for item in value[:5]]))
    if not isinstance(value, dict):
        return ""
    message = next(filter(None, (_message(value.get(name), depth - 1) for name in _MESSAGE)), "")
    field = value.get("param") or value.get("loc")  # the field at fault
    field = ".".join(map(str, field[:5])) if isinstance(field, list) else field
    return f"{field}: {message}" if isinstance(field, str) and field not in message else message


def _refused_field(words: str, body: Mapping[str, Any]) -> str:
    """Return the first field of a request that a refusal names; empty if the request is too long or none."""
    if _TOO_LONG.search(words):
        return ""
    named = {
        name: match.start() for name in _FIELDS if name in body and (match := _FIELDS[name].search(words))
    }
    return min(named, key=lambda name: named[name], default="")


def _retry_after(headers: Mapping[str, str]) -> float | None:
    """Return the seconds to wait by the header Retry-After, seconds or a date; None without it."""
    text = headers.get("Retry-After", "")[:100]
    try:
        date = email.utils.parsedate_tz(text)
        seconds = float(text) if date is None else email.utils.mktime_tz(date) - time.time()
    except (ValueError, OverflowError):
        return None
    return max(seconds, 0.0) if math.isfinite(seconds) else None


def _reply(choice: Any, masked: Callable[[str], str]) -> Reply:
    """Return the reply in one choice of a chat completion.

    Raises:
        KeyError, TypeError, ValueError, AttributeError: it is none.
    """
    message = choice["message"]
    content, refusal = message.get("content"), message.get("refusal") or ""
    if isinstance(content, list):  # of parts; others hold what the model thinks
        refusal = refusal or "".join([part["refusal"] for part in content if part["type"] == "refusal"])
        content = "".join([part["text"] for part in content if part["type"] in ("text", "output_text")])
    if not isinstance(content, str | None) or not isinstance(refusal, str):
        raise TypeError("its content is no text")
    text = masked(content or "")
    tokens = (choice.get("logprobs") or {}).get("content") or []
    strings = [str(token["token"]) for token in tokens]
    joined = "".join(strings)
    ends = list(accumulate(map(len, strings))) if joined.split() == text.split() else []
    return Reply(
        text=joined if ends else text,
        finish=str(choice.get("finish_reason") or ""),
        refusal=masked(refusal),
        called_tool=bool(message.get("tool_calls") or message.get("function_call")),
        ends=ends,
        logprobs=[_finite(token["logprob"]) for token in tokens],
    )


def _finite(number: Any) -> float:
    try:
        return float(number)
    except OverflowError:  # an integer of hundreds of digits
        return math.nan

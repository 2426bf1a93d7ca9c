"""Served chat models, by a stub server that is slow, fails, limits rates, hangs up and returns garbage."""

from __future__ import annotations

import base64
import email.utils
import io
import itertools
import json
import math
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from chat_server import ChatServer, Misbehaviour, images, parts, prompt
from PIL import Image
from toy import Run, capvid, write_video

import capvid as package
from capvid.errors import RunError, UsageError
from capvid.vlm import endpoint

__all__ = ["capvid"]

FRAMES = (3, 5, 6, 4, 7)  # by clip, so that the answer tells clips apart


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[ChatServer]:
    monkeypatch.setattr(endpoint, "PAUSE", 0.01)
    stub = ChatServer()
    yield stub
    stub.close()


@pytest.fixture(scope="module")
def clips(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    home = tmp_path_factory.mktemp("clips")
    return [write_video(home / f"{n}.mp4", seed=n, frames=n, size=(96, 64)) for n in FRAMES]


def texts(server: ChatServer, clips: list[Path], **options: Any) -> list[str]:
    with package.load(endpoint=server.url, workers=1, **options) as pipeline:
        results = list(pipeline.stream(clips))
    return [str(result.error) if result.error else result.captions[0].text for result in results]


def failing(errors: list[Misbehaviour]) -> Misbehaviour:
    """Misbehave in a different way at each try of a request, and then answer."""
    tries: Counter[int] = Counter()

    def misbehave(handler: Any, body: dict[str, Any]) -> bool:
        count = images(body)
        tries[count] += 1
        return tries[count] <= len(errors) and errors[tries[count] - 1](handler, body)

    return misbehave


def status(code: int, **headers: str) -> Misbehaviour:
    def misbehave(handler: Any, body: dict[str, Any]) -> bool:
        handler.answer({"error": {"message": "try\nlater"}}, code, **headers)
        return True

    return misbehave


def hang_up(handler: Any, body: dict[str, Any]) -> bool:
    handler.connection.close()
    return True


def garbage(handler: Any, body: dict[str, Any]) -> bool:
    handler.send(b"\xff<html>", 200)
    return True


def cut_off(handler: Any, body: dict[str, Any]) -> bool:
    handler.send_response(200)
    handler.send_header("Content-Length", "1000")
    handler.end_headers()
    handler.wfile.write(b'{"choices": [')
    handler.connection.close()
    return True


EXPECTED = [f"{n} images seen." for n in FRAMES]


def test_frames_times_and_options_reach_the_server(
    server: ChatServer, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.KEY, "secret")
    options: dict[str, Any] = {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,
        "max_length": 9,
        "num_captions": 2,
    }
    pipeline = package.load(
        endpoint=server.url, system="Be brief.", prompt="What?", max_pixels=1024, **options
    )
    (result,) = pipeline.stream(clips[:1])
    pipeline.close()
    assert result.times is not None and pipeline.model == f"toy-vlm@{server.url.split('/')[2]}"
    (body,) = server.bodies
    assert {name: body[name] for name in ("temperature", "top_p", "seed", "max_tokens", "n")} == {
        "temperature": 0.5,
        "top_p": 0.9,
        "seed": 4,
        "max_tokens": 9,
        "n": 2,
    }
    assert body["messages"][0] == {"role": "system", "content": "Be brief."} and prompt(body) == "What?"
    assert [part["text"] for part in parts(body)[::2]][:3] == [f"Frame at {t:.1f} s:" for t in result.times]
    data = parts(body)[1]["image_url"]["url"].removeprefix("data:image/jpeg;base64,")
    assert Image.open(io.BytesIO(base64.b64decode(data))).size == (39, 26)
    assert {headers["Authorization"] for headers in server.headers} == {"Bearer secret"}
    assert "secret" not in repr(pipeline) and "secret" not in json.dumps(dict(pipeline.settings))
    first, second = result.captions
    assert first.text == second.text == "3 images seen." and first.logprob == -1.5
    assert [word.logprob for word in first.words] == [0, -0.25, -1.25]


def test_answers_without_logprobs(server: ChatServer, clips: list[Path], capvid: Run) -> None:
    server.logprobs = False
    with package.load(endpoint=server.url) as pipeline:
        (result,) = pipeline.stream(clips[:1])
    assert math.isnan(result.captions[0].logprob) and len(result.captions[0].words) == 3
    code, text, _ = capvid("caption", clips[0], "--endpoint", server.url, "--format", "json")
    record = json.loads(text)
    assert code == 0 and record["captions"][0]["logprob"] is None
    assert record["captions"][0]["words"][0] == {"word": "3", "logprob": None}


def test_logprobs_that_are_no_numbers() -> None:
    tokens = [{"token": "a", "logprob": -1.0}, {"token": " man", "logprob": float("-inf")}]
    caption = endpoint._caption({"message": {"content": "a man"}, "logprobs": {"content": tokens}})
    assert caption.text == "a man" and math.isnan(caption.logprob)
    empty = endpoint._caption(
        {"message": {"content": ""}, "logprobs": {"content": [{"token": "", "logprob": -1}]}}
    )
    assert (empty.text, empty.logprob, empty.words) == ("", -1.0, ())


def test_every_transient_failure_is_overcome(server: ChatServer, clips: list[Path]) -> None:
    server.misbehave = failing([status(500), hang_up, garbage, cut_off, status(503)])
    assert texts(server, clips, batch_size=3) == EXPECTED
    assert len(server.bodies) == 6 * len(clips)


def test_rate_limits(server: ChatServer, clips: list[Path]) -> None:
    date = email.utils.formatdate(time.time() + 2, usegmt=True)
    server.misbehave = failing([status(429, Retry_After="1"), status(429, Retry_After=date)])
    start = time.monotonic()
    assert texts(server, clips[:1]) == EXPECTED[:1]
    assert 1 < time.monotonic() - start < 20
    assert endpoint._retry_after({"Retry-After": "1e9"}, 0.5) == 300  # type: ignore[arg-type]
    for text in (
        "soon",
        "nan",
        "1e400",
        "Mon, 01 Jan 99999 00:00:00 GMT",
        f"Mon, 01 Jan {10**20} 00:00:00 GMT",
    ):
        assert endpoint._retry_after({"Retry-After": text}, 0.5) == 0.5  # type: ignore[arg-type]


@pytest.mark.parametrize("key", ["se cret", "secret\r\nX: y", "secrét"])
def test_a_key_that_no_header_can_hold_is_not_shown(
    key: str, server: ChatServer, clips: list[Path], capvid: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(endpoint.KEY, f"{key}\r\n")
    code, _, stderr = capvid("caption", clips[0], "--endpoint", server.url)
    assert code == 2 and f"{endpoint.KEY}: this is no key" in stderr and "cr" not in stderr
    monkeypatch.setenv(endpoint.KEY, "secret\r\n")
    assert capvid("caption", clips[0], "--endpoint", server.url)[0] == 0
    assert server.headers[-1]["Authorization"] == "Bearer secret"


def test_an_answer_without_end(
    server: ChatServer, clips: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    def drip(handler: Any, body: dict[str, Any]) -> bool:
        handler.send_response(200)
        handler.end_headers()
        with suppress(OSError):
            while True:
                handler.wfile.write(b" ")
        return True

    server.misbehave = drip
    monkeypatch.setattr(endpoint, "TRIES", 2)
    model = endpoint.ServedModel(server.url, timeout=60)
    with monkeypatch.context() as patch:
        clock = SimpleNamespace(monotonic=itertools.count(step=25).__next__, sleep=lambda seconds: None)
        patch.setattr(endpoint, "time", clock)  # reading a part takes 25 seconds
        with pytest.raises(endpoint.EndpointError, match=r"the answer takes too long.*tried 2 times"):
            model._request("chat/completions", {"messages": [{"content": []}]})
    monkeypatch.setattr(endpoint, "_MAX_ANSWER", 1000)
    server.misbehave = lambda handler, body: handler.send(b" " * 1001, 200) or True
    with pytest.raises(endpoint.EndpointError, match="the answer is too large"):
        model._request("chat/completions", {"messages": [{"content": []}]})


def test_requests_are_concurrent_and_answers_in_order(server: ChatServer, clips: list[Path]) -> None:
    at_once = threading.Event()

    def gather(handler: Any, body: dict[str, Any]) -> bool:
        if server.active >= 3:
            at_once.set()
        at_once.wait(2)  # in vain in the first batch: it has the videos that were decoded at once
        return False

    server.misbehave = gather
    assert texts(server, clips * 2, batch_size=5) == EXPECTED * 2
    assert 3 <= server.most <= 5


def test_one_refused_clip_leaves_the_others_alone(
    server: ChatServer, clips: list[Path], capvid: Run, tmp_path: Path
) -> None:
    def refuse(handler: Any, body: dict[str, Any]) -> bool:
        return images(body) == 5 and status(400)(handler, body)

    server.misbehave = refuse
    run = ["caption", *clips, "--endpoint", server.url, "--output-dir", tmp_path]
    code, _, stderr = capvid(*run)
    assert code == 3 and "5.mp4: " in stderr and "HTTP status 400 (try later)" in stderr
    assert stderr.endswith("4 captioned, 1 failed\n") and len(server.bodies) == 5
    server.misbehave = lambda handler, body: False
    assert capvid(*run)[0] == 0 and len(server.bodies) == 6
    assert [(tmp_path / f"{n}.txt").read_text().strip() for n in FRAMES] == EXPECTED


def test_a_server_that_fails_for_good(server: ChatServer, clips: list[Path]) -> None:
    server.misbehave = status(502)
    for text in texts(server, clips[:2]):
        assert "HTTP status 502 (try later); check that the server runs; tried 6 times" in text
    logprobs = [{"token": "a", "logprob": None}]
    for choice in (
        {},
        {"message": {"content": ["a man"]}},
        {"message": {"content": "a"}, "logprobs": {"content": logprobs}},
    ):
        answer = {"choices": [choice]}
        server.misbehave = lambda handler, body, answer=answer: handler.answer(answer, 200) or True  # type: ignore[misc]
        assert "the answer is not a chat completion" in texts(server, clips[:1])[0]
    server.misbehave = status(302, Location="http://127.0.0.1:9/")
    assert "HTTP status 302" in texts(server, clips[:1])[0]


def test_errors_that_concern_every_request(server: ChatServer, clips: list[Path], capvid: Run) -> None:
    server.misbehave = status(401)
    code, _, stderr = capvid("caption", *clips, "--endpoint", server.url, "--model", "other")
    assert code == 1 and "HTTP status 401 (try later); check --endpoint, --model and the key" in stderr
    assert {body["model"] for body in server.bodies} == {"other"}
    with pytest.raises(RunError, match="the endpoint lists no models; name the model with --model"):
        package.load(endpoint=f"{server.url}/other")
    urls = (
        "localhost:8000",
        "ftp://host/v1",
        "http://[::1",
        "http://h:99999/v1",
        "http://h/v 1",
        "http://a:pw@h/v1",
    )
    for url in urls:
        with pytest.raises(UsageError, match="not the address of an endpoint") as refused:
            package.load(endpoint=url)
        assert "pw" not in str(refused.value)
    with pytest.raises(UsageError, match="precision: endpoints have no such option"):
        package.load(endpoint=server.url, precision="bf16")
    with pytest.raises(UsageError, match="endpoints do not support beam_size"):
        package.load(endpoint=server.url, beam_size=3)
    with pytest.raises(RunError, match="no valid answer"):
        package.load(endpoint="http://127.0.0.1:9/v1")


def test_context_reaches_the_server(server: ChatServer, clips: list[Path]) -> None:
    with package.load(endpoint=server.url, segments=3, context=2) as pipeline:
        list(pipeline.stream([clips[4]]))
    first, second, third = map(prompt, server.bodies)
    captions = [f"{images(body)} images seen." for body in server.bodies]
    assert "images" not in first and captions[0] in second
    assert f"{captions[0]} {captions[1]}" in third


@pytest.mark.slow
def test_an_interrupted_run_stops_at_once(server: ChatServer, clips: list[Path]) -> None:
    server.delay = 60
    command = [sys.executable, "-m", "capvid", "caption", str(clips[0]), "--endpoint", server.url]
    process = subprocess.Popen(command, stderr=subprocess.PIPE, text=True)
    deadline = time.monotonic() + 60
    while not server.bodies and time.monotonic() < deadline:
        time.sleep(0.05)
    start = time.monotonic()
    process.send_signal(2)
    stderr = process.communicate(timeout=50)[1]
    assert process.returncode == 130 and "Traceback" not in stderr
    assert time.monotonic() - start < 20

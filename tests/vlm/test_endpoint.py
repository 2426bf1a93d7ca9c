"""Served chat models, by a stub server that is slow, fails, limits rates, hangs up and returns garbage."""

from __future__ import annotations

import asyncio
import base64
import email.utils
import io
import json
import math
import shutil
import socket
import ssl
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from chat_server import ChatServer, Misbehaviour, images, parts, prompt
from PIL import Image
from toy import Run, capvid, write_video

import capvid as package
from capvid.cli import caption as caption_command
from capvid.decoding.caption_generator import Clip
from capvid.decoding.decoding_options import DecodingOptions
from capvid.errors import RunError, UsageError
from capvid.vlm import endpoint
from capvid.vlm.answers import caption_of

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


def clip(frames: int = 3) -> Clip:
    return Clip(frames=np.zeros((frames, 8, 8, 3), np.uint8), times=np.arange(frames), start=0.0, end=3.0)


def ask(server: ChatServer, *clips: Clip, **options: Any) -> list[str]:
    """Return the captions of clips, or their errors, without decoding any video."""
    options = {"beam_size": 1, "max_length": 64, **options}
    model = endpoint.ServedModel(server.url, "m")
    clips = clips or (clip(),)
    answers = model.generate(clips, ["What?"] * len(clips), DecodingOptions(**options))
    return [str(each) if isinstance(each, Exception) else each[0].text for each in answers]


@contextmanager
def raw_server(serve: Callable[[socket.socket], None]) -> Iterator[str]:
    """Serve each connection by a function, which may misbehave in any way; yield the address."""
    listener = socket.create_server(("127.0.0.1", 0))

    def accept() -> None:
        with suppress(OSError):
            while True:
                connection, _ = listener.accept()
                threading.Thread(target=serve_one, args=(connection,), daemon=True).start()

    def serve_one(connection: socket.socket) -> None:
        with connection, suppress(OSError):
            serve(connection)

    threading.Thread(target=accept, daemon=True).start()
    with listener:
        yield f"http://127.0.0.1:{listener.getsockname()[1]}/v1"


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


def answering(server: ChatServer, **choice: Any) -> None:
    """Let the server answer with this choice."""
    choice.setdefault("message", {"content": "a man"})
    server.misbehave = lambda handler, body: handler.answer({"choices": [choice]}, 200) or True


@pytest.mark.parametrize("number", ["-Infinity", "NaN", "-" + "9" * 400])
def test_logprobs_that_are_no_numbers(number: str, server: ChatServer) -> None:
    tokens = f'[{{"token": "a", "logprob": -1.0}}, {{"token": " man", "logprob": {number}}}]'
    answer = f'{{"choices": [{{"message": {{"content": "a man"}}, "logprobs": {{"content": {tokens}}}}}]}}'
    server.misbehave = lambda handler, body: handler.send(answer.encode(), 200) or True
    model = endpoint.ServedModel(server.url, "m")
    ((caption,),) = model.generate([clip()], [""], DecodingOptions(beam_size=1))  # type: ignore[misc]
    assert caption.text == "a man" and math.isnan(caption.logprob)


@pytest.mark.parametrize(
    ("choice", "reason"),
    [
        ({"message": {"content": None}}, "the model's answer is empty"),
        ({"message": {"content": " \n"}}, "the model's answer is empty"),
        ({"message": {"content": "", "reasoning_content": "A man."}}, "the model's answer is empty"),
        ({"message": {"content": "<think>A man."}}, "the model only thought and did not answer"),
        (
            {"message": {"content": "I'm sorry, I can't help with that."}},
            "the model refused: I'm sorry, I ca",
        ),
        ({"message": {"content": None, "refusal": "No."}}, "the model refused: No."),
        ({"message": {"content": [{"type": "refusal", "refusal": "No."}]}}, "the model refused: No."),
        ({"message": {"tool_calls": [{"id": "1"}]}}, "the model called a tool instead of answering"),
        ({"finish_reason": "abort"}, "the server broke off the answer (finish reason abort)"),
        ({"finish_reason": "content_filter"}, "a filter of the server blocked the answer"),
        ({"finish_reason": "length"}, "the answer was cut at --max-length 64; use a greater --max-length"),
    ],
)
def test_an_answer_that_is_no_caption(choice: dict[str, Any], reason: str, server: ChatServer) -> None:
    answering(server, **choice)
    assert reason in ask(server)[0] and len(server.bodies) == 1


def bad_answers(handler: Any, body: dict[str, Any]) -> bool:
    choices: dict[int, dict[str, Any]] = {
        5: {"finish_reason": "length", "message": {"content": "A man"}},
        6: {"message": {"content": "I can't assist with that."}},
        4: {"message": {"content": None}},
        7: {"finish_reason": "length", "message": {"content": "A man"}},
    }
    return images(body) in choices and (handler.answer({"choices": [choices[images(body)]]}, 200) or True)


@pytest.mark.parametrize("sidecar", [False, True])
def test_an_answer_that_is_no_caption_is_a_failure(
    sidecar: bool, server: ChatServer, clips: list[Path], capvid: Run, tmp_path: Path
) -> None:
    """Nothing is written, not even a trigger word, and a rerun asks again."""
    clips = [Path(shutil.copy(path, tmp_path)) for path in clips]
    output = ["--sidecar"] if sidecar else ["--output-dir", tmp_path]
    run = ["caption", *clips, "--endpoint", server.url, "--prefix", "trigger, ", "--workers", 1, *output]
    server.misbehave = bad_answers
    code, _, stderr = capvid(*run)
    assert code == 3 and "4 failed (2 cut at --max-length, 1 empty, 1 refused)" in stderr
    assert [path.name for path in tmp_path.glob("*.txt")] == ["3.txt"]
    server.misbehave = lambda handler, body: False
    code, _, stderr = capvid(*run)
    assert code == 0 and "4 captioned" in stderr and "1 skipped" in stderr
    assert [(tmp_path / f"{n}.txt").read_text() for n in FRAMES] == [
        f"trigger, {text}\n" for text in EXPECTED
    ]


def test_records_and_shards_say_what_was_wrong(
    server: ChatServer, clips: list[Path], capvid: Run, tmp_path: Path
) -> None:
    server.misbehave = bad_answers
    run = ["caption", *clips, "--endpoint", server.url, "--max-length", 9, "--workers", 1]
    code, text, _ = capvid(*run, "--format", "jsonl")
    errors = [record["error"] for record in map(json.loads, text.splitlines())]
    kinds = ["answer-truncated", "answer-refusal", "answer-empty", "answer-truncated"]
    assert code == 3 and errors[0] is None and [error["kind"] for error in errors[1:]] == kinds
    assert "cut at --max-length 9" in errors[1]["message"]
    code, _, stderr = capvid(*run, "--output-dir", tmp_path, "--format", "parquet")
    assert code == 3 and "4 failed (2 cut at --max-length, 1 empty, 1 refused)" in stderr


def test_thinking_and_parts(server: ChatServer) -> None:
    parts = [
        {"type": "thinking", "thinking": []},
        {"type": "text", "text": "A "},
        {"type": "text", "text": "man."},
    ]
    for message in (
        {"content": "<think>Sorry?</think>\nA man.", "reasoning_content": "Hm."},
        {"content": "Let me see.</think>A man."},
        {"content": parts},
    ):
        answering(server, message=message)
        assert ask(server) == ["A man."]


def test_work_is_bounded_whatever_the_server_sends(server: ChatServer) -> None:
    tokens = [{"token": "a ", "logprob": -1}] * 100_000
    answer = {"message": {"content": "a " * 100_000}, "logprobs": {"content": tokens}}
    start = time.process_time()
    for content, message in (
        (json.dumps({"choices": [{"message": {"content": "a " * 30_000_000}}]}), "the answer is too large"),
        (json.dumps({"choices": [answer]}), "the answer has 200000 characters"),
        (
            json.dumps({"choices": [{"message": {"content": "a " * 1_000_000}}]}),
            "the answer has 2000000 char",
        ),
    ):
        data = content.encode()
        server.misbehave = lambda handler, body, data=data: handler.send(data, 200) or True  # type: ignore[misc]
        before = len(server.bodies)
        assert message in ask(server)[0] and len(server.bodies) == before + 1
    choices = [{"message": {"content": f"caption {n}"}} for n in range(2000)]
    server.misbehave = lambda handler, body: handler.answer({"choices": choices}, 200) or True
    model = endpoint.ServedModel(server.url)
    options = DecodingOptions(beam_size=1, max_length=64)
    (captions,) = model.generate([clip()], [""], options)
    assert not isinstance(captions, Exception) and [caption.text for caption in captions] == ["caption 0"]
    assert time.process_time() - start < 20


def test_many_logprobs_take_linear_time() -> None:
    tokens = [{"token": f" {n}", "logprob": -1} for n in range(15_000)]
    content = "".join(token["token"] for token in tokens)
    start = time.process_time()
    reply = endpoint._reply({"message": {"content": content}, "logprobs": {"content": tokens}}, str)
    caption = caption_of(reply, max_length=1000)
    assert [word.logprob for word in caption.words] == [-1.0] * 15_000 and time.process_time() - start < 2


def refusing(*fields: str, form: Any) -> Misbehaviour:
    """Refuse requests with one of these fields, in an answer that ``form`` makes of the field."""

    def misbehave(handler: Any, body: dict[str, Any]) -> bool:
        named = next((name for name in fields if name in body), None)
        if named is not None:
            handler.answer(*form(named))
        elif "n" in fields or "max_tokens" in fields:
            handler.answer({"choices": [handler.choice(body)]}, 200)
            return True
        return named is not None

    return misbehave


def openai(name: str) -> tuple[Any, int]:
    use = " Use 'max_completion_tokens' instead." if name == "max_tokens" else ""
    message = f"Unsupported parameter: '{name}' is not supported with this model.{use}"
    return {"error": {"message": message, "param": name, "code": "unsupported_parameter"}}, 400


def pydantic(name: str) -> tuple[Any, int]:
    detail = {"type": "extra_forbidden", "loc": ["body", name], "msg": "Extra inputs are not permitted"}
    return {"detail": [detail]}, 422


REFUSALS = {
    "openai": openai,
    "pydantic": pydantic,
    "list": lambda name: ([{"error": {"code": 400, "message": f'Invalid value at "{name}"'}}], 400),
    "detail": lambda name: ({"detail": f"unknown field `{name}`"}, 400),
    "text": lambda name: ({"error": f"field '{name}' is not supported"}, 400),
    "200": lambda name: ({"error": {"message": f"'{name}' must be left out"}}, 200),
    "500": lambda name: ({"error": {"code": 500, "message": f"Unsupported param: {name}"}}, 500),
}


@pytest.mark.parametrize("form", REFUSALS)
@pytest.mark.parametrize("fields", [("max_tokens",), ("logprobs", "seed"), ("temperature",), ("n", "top_p")])
def test_fields_that_a_server_refuses(
    fields: tuple[str, ...],
    form: str,
    server: ChatServer,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """They are left out or renamed after the first refusal, and for the rest of the run."""
    server.misbehave = refusing(*fields, form=REFUSALS[form])
    model = endpoint.ServedModel(server.url, "m")
    options = DecodingOptions(beam_size=1, max_length=9)
    answers = [model.generate([clip()], ["What?"], options)[0] for _ in range(3)]
    assert [each[0].text for each in answers if isinstance(each, tuple)] == EXPECTED[:1] * 3
    assert len(server.bodies) == 3 + len(fields)
    assert all(name not in server.bodies[-1] for name in fields)
    assert ("max_tokens" in fields) == (server.bodies[-1].get("max_completion_tokens") == 9)
    for name in fields:
        assert f" refuses {name}; " in caplog.text and caplog.text.count(f" refuses {name}; ") == 1


def test_several_captions_that_a_server_refuses(server: ChatServer) -> None:
    server.misbehave = refusing("n", form=openai)
    with pytest.raises(RunError, match=r"'n' is not supported.*leave out --num-captions"):
        ask(server, temperature=1.0, num_captions=2)


def test_a_request_that_a_filter_blocks(server: ChatServer) -> None:
    error = {"code": "content_filter", "message": "The prompt was filtered"}
    server.misbehave = lambda handler, body: handler.answer({"error": error}, 400) or True
    assert "a filter of the server blocked the request (The prompt was filtered)" in ask(server)[0]


def test_a_request_that_is_too_long_is_not_a_refused_field(server: ChatServer) -> None:
    message = "'max_tokens' is too large: 64. This model's maximum context length is 4096 tokens"
    server.misbehave = lambda handler, body: handler.answer({"message": message}, 400) or True
    assert "maximum context length is 4096 tokens); fewer frames" in ask(server)[0]
    assert len(server.bodies) == 1


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
    assert endpoint._retry_after({"Retry-After": "1e9"}) == 1e9
    for text in (
        "soon",
        "nan",
        "1e400",
        "Mon, 01 Jan 99999 00:00:00 GMT",
        f"Mon, 01 Jan {10**20} 00:00:00 GMT",
    ):
        assert endpoint._retry_after({"Retry-After": text}) is None


def test_a_pause_that_is_longer_than_the_timeout_ends_the_run(server: ChatServer) -> None:
    server.misbehave = status(429, Retry_After="30")
    model = endpoint.ServedModel(server.url, "m", timeout=20)
    with pytest.raises(RunError, match=r"HTTP status 429 \(try later\); the server asks to wait 30 s; run"):
        model.generate([clip()], ["What?"], DecodingOptions(beam_size=1))
    assert len(server.bodies) == 1


def test_pauses_end_with_the_timeout(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(endpoint, "PAUSE", 1.5)
    server.misbehave = status(500)
    model = endpoint.ServedModel(server.url, "m", timeout=3)
    (error,) = model.generate([clip()], ["What?"], DecodingOptions(beam_size=1))
    assert isinstance(error, endpoint.EndpointError) and "HTTP status 500 (try later); check that" in str(
        error
    )
    assert 1 <= len(server.bodies) < endpoint.TRIES


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
DRIPS = {  # an answer's beginning, and what follows without end
    "headers": (b"HTTP/1.1 200 OK\r\n", b"X-A: b\r\n"),
    "slow headers": (b"HTTP/1.1 200 OK\r\nX-A: ", b"b"),
    "100-continue": (b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "body": (HEAD, b"1\r\n \r\n"),
    "error body": (HEAD.replace(b"200 OK", b"400 Bad Request"), b"1\r\n \r\n"),
    "trailers": (HEAD + b"2\r\n{}\r\n0\r\n", b"X-A: b\r\n"),
    "nothing": (b"", b""),
}


@pytest.mark.parametrize("drip", DRIPS)
def test_an_answer_without_end(drip: str) -> None:
    """The timeout covers the complete exchange, however steadily something comes."""
    begin, more = DRIPS[drip]

    def serve(connection: socket.socket) -> None:
        connection.recv(1 << 20)
        connection.sendall(begin)
        while True:
            connection.sendall(more)
            time.sleep(0.02)

    start = time.monotonic()
    with raw_server(serve) as url:
        model = endpoint.ServedModel(url, "m", timeout=1)
        (error,) = model.generate([clip()], ["What?"], DecodingOptions(beam_size=1))
    assert "no answer within --timeout 1 s" in str(error) and time.monotonic() - start < 8


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


def test_within_a_running_event_loop(server: ChatServer) -> None:
    """Notebooks run one."""

    async def cell() -> list[str]:
        return ask(server, clip(3), clip(5))

    assert asyncio.run(cell()) == EXPECTED[:2]


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


def test_a_server_that_fails_for_good(server: ChatServer) -> None:
    server.misbehave = status(502)
    for text in ask(server, clip(), clip()):
        assert "HTTP status 502 (try later); check that the server runs; tried 6 times" in text
    logprobs = [{"token": "a", "logprob": None}]
    for choice in (
        {},
        {"message": {"content": ["a man"]}},
        {"message": {"content": "a"}, "logprobs": {"content": logprobs}},
    ):
        answer = {"choices": [choice]}
        server.misbehave = lambda handler, body, answer=answer: handler.answer(answer, 200) or True  # type: ignore[misc]
        assert "the answer is not a chat completion" in ask(server)[0]


def html(handler: Any, body: dict[str, Any]) -> bool:
    handler.send(b"<!DOCTYPE html><html><title>Welcome</title></html>", 200)
    return True


def quota(handler: Any, body: dict[str, Any]) -> bool:
    error = {"message": "You exceeded your current quota.", "code": "insufficient_quota"}
    handler.answer({"error": error}, 429)
    return True


@pytest.mark.parametrize(
    ("misbehave", "reason"),
    [
        (status(302, Location="http://127.0.0.1:9/"), "redirected to http://127.0.0.1:9/; give the final"),
        (html, "a web page, not an API (Welcome); --endpoint often ends in /v1"),
        (quota, "HTTP status 429 (You exceeded your current quota.); check the plan and the billing"),
        (status(402), "HTTP status 402 (try later); check --endpoint"),
    ],
)
def test_failures_for_good_end_the_run_at_once(
    misbehave: Misbehaviour, reason: str, server: ChatServer, clips: list[Path], capvid: Run
) -> None:
    server.misbehave = misbehave
    code, _, stderr = capvid("caption", *clips, "--endpoint", server.url)
    assert code == 1 and reason in stderr and stderr.count("error: ") == 1
    assert len(server.bodies) == 1


@pytest.mark.parametrize(
    ("address", "reason"),
    [
        ("http://127.0.0.1:9/v1", "127.0.0.1:9: no valid answer (Connection refused); start the server"),
        ("http://no.such.invalid/v1", "no.such.invalid: no valid answer ("),
    ],
)
def test_a_server_that_does_not_run_ends_the_run_at_once(
    address: str, reason: str, clips: list[Path], capvid: Run
) -> None:
    code, _, stderr = capvid("caption", *clips, "--endpoint", address, "--model", "m")
    assert code == 1 and reason in stderr and stderr.count("error: ") == 1


def test_a_server_that_stops_during_the_run(server: ChatServer, clips: list[Path], capvid: Run) -> None:
    """It may come back, so that requests are tried again; then the run ends."""

    def stop(handler: Any, body: dict[str, Any]) -> bool:
        if images(body) == 5:
            server.server.socket.close()
            handler.connection.close()
        return images(body) == 5

    server.misbehave = stop
    options = ["--endpoint", server.url, "--batch-size", 1, "--format", "jsonl"]
    code, text, stderr = capvid("caption", *clips, *options)
    assert code == 1 and "no valid answer (Connection refused); start the server" in stderr
    assert [json.loads(line)["status"] for line in text.splitlines()] == ["ok"]


def test_a_certificate_that_is_not_trusted(clips: list[Path], tmp_path: Path) -> None:
    key, certificate = tmp_path / "key.pem", tmp_path / "certificate.pem"
    command = ["openssl", "req", "-x509", "-newkey", "rsa:2048", "-nodes", "-subj", "/CN=localhost"]
    subprocess.run([*command, "-keyout", key, "-out", certificate], check=True, capture_output=True)
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificate, key)

    def serve(connection: socket.socket) -> None:
        context.wrap_socket(connection, server_side=True)

    with (
        raw_server(serve) as url,
        pytest.raises(RunError, match=r"self-signed certificate.*; set SSL_CERT_FI"),
    ):
        package.load(endpoint=url.replace("http:", "https:"))


def test_proxies(server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    """This machine is reached directly; for other hosts, messages name the proxy, without its password."""
    for name in ("http_proxy", "HTTP_PROXY"):
        monkeypatch.setenv(name, "http://user:password@127.0.0.1:9")
    for name in ("no_proxy", "NO_PROXY"):
        monkeypatch.delenv(name, raising=False)
    assert ask(server) == EXPECTED[:1]
    assert ask(SimpleNamespace(url=server.url.replace("127.0.0.1", "localhost"))) == EXPECTED[:1]  # type: ignore[arg-type]
    with pytest.raises(RunError, match=r"example\.org \(by the proxy 127\.0\.0\.1:9\): no valid") as refused:
        package.load(endpoint="http://example.org/v1")
    assert "password" not in str(refused.value)
    monkeypatch.setenv("no_proxy", "example.invalid")
    with pytest.raises(RunError, match=r"^example\.invalid: no valid answer"):
        package.load(endpoint="http://example.invalid/v1")
    monkeypatch.setenv("http_proxy", "socks9://127.0.0.1:9")
    with pytest.raises(UsageError, match="set http_proxy to http://HOST:PORT"):
        package.load(endpoint="http://example.org/v1")


def test_the_key_is_masked_in_all_that_the_server_sends(
    server: ChatServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    key = "sk-1234567890/abc"
    monkeypatch.setenv(endpoint.KEY, key)
    logprobs = {"content": [{"token": f"a {key}", "logprob": -1}]}
    for misbehave in (
        lambda handler, body: handler.answer({"error": f"{key} is wrong"}, 401),
        lambda handler, body: handler.answer({"error": "x" * 190 + key}, 400),
        lambda handler, body: handler.send(f"<html><title>{key}".encode(), 200),
        lambda handler, body: handler.answer({}, 301, Location=f"http://a/{key}"),
        lambda handler, body: handler.answer(
            {"choices": [{"message": {"content": f"a {key}"}, "logprobs": logprobs}]}, 200
        ),
        lambda handler, body: handler.answer(
            {"choices": [{"message": {"content": "", "refusal": key}}]}, 200
        ),
    ):
        server.misbehave = lambda handler, body, misbehave=misbehave: misbehave(handler, body) or True  # type: ignore[misc]
        try:
            (text,) = ask(server)
        except RunError as error:
            text = str(error)
        assert ("***" in text or "xxx..." in text) and key[:8] not in text


@pytest.mark.parametrize("data", [[{"id": None}], [{"id": ""}], [{}], [None], None, []])
def test_a_model_without_a_name(data: Any, server: ChatServer, monkeypatch: pytest.MonkeyPatch) -> None:
    server.models = data
    with pytest.raises(RunError, match="the endpoint lists no models; name the model with --model"):
        package.load(endpoint=server.url)


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
        "http://[:::]/v1",
        "http://999.1.1.1/v1",
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


def test_prompt_files(server: ChatServer, clips: list[Path], capvid: Run, tmp_path: Path) -> None:
    """They may have a byte-order mark; a mistyped name is no prompt."""
    (tmp_path / "prompt.txt").write_bytes(b"\xef\xbb\xbfWhat happens?\r\n")
    (tmp_path / "empty.txt").write_bytes(b"\xef\xbb\xbf\n")
    (tmp_path / "utf16.txt").write_text("What?", encoding="utf-16")
    run = ["caption", clips[0], "--endpoint", server.url, "--workers", 1, "--prompt"]
    assert capvid(*run, tmp_path / "prompt.txt")[0] == 0 and prompt(server.bodies[-1]) == "What happens?"
    for name, message in (
        (
            tmp_path / "promtp.txt",
            "promtp.txt: there is no such file with a prompt; did you mean prompt.txt",
        ),
        ("a" * 5000 + ".txt", "there is no such file with a prompt"),
        ("my prompt.txt", "my prompt.txt: there is no such file with a prompt; a prompt without a file is a"),
        ("prompts/caption.md", "prompts/caption.md: there is no such file"),
        (f"{tmp_path}/", "there is no such file with a prompt"),
        (tmp_path / "empty.txt", "empty.txt: not a prompt (it is empty)"),
        (tmp_path / "utf16.txt", "utf16.txt: not a prompt ('utf-8' codec"),
    ):
        code, _, stderr = capvid(*run, name)
        assert code == 2 and message in stderr
    sent = len(server.bodies)
    for text in (
        "Describe.",
        "What?",
        "Describe this video... briefly",
        "Who/what/where?",
        "描述.视频",
        "Go!now",
    ):
        assert caption_command._read_prompt(text) == text
    assert len(server.bodies) == sent


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

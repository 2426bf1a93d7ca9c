"""A local server with the Hub's protocol for downloads and uploads."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import forked
import yaml

COMMIT = "aa6c2d36d56bc0209040c02b5a7b7d7bf11d57b8"
TOKEN = "hf_the-right-one"
OWNER = "anna"  # owner of the token


class FakeHub:
    """Serves files as the Hub serves large files, by a redirect.

    Attributes:
        files: contents by ``OWNER/NAME/COMMIT/PATH``.
        main: commit of the main branch of repositories to which nothing was pushed.
        branches: commits by branch of each created repository.
        cuts: numbers of bytes after which the next downloads are cut off, one per download.
        gone_after_cut: whether the server stops answering after a cut.
        ranges: ``Range`` headers of the partial downloads.
        uploads: requests that change something.
    """

    def __init__(self, port: int = 0) -> None:
        self.files: dict[str, bytes] = {}
        self.requests: list[str] = []
        self.main = COMMIT
        self.cuts: list[int] = []
        self.gone_after_cut = self.gone = False
        self.ranges: list[str] = []
        self.branches: dict[str, dict[str, str]] = {}
        self.private: set[str] = set()
        self.objects: dict[str, bytes] = {}
        self.uploads: list[str] = []
        self.messages: list[str] = []
        hub = self

        class Handler(_Handler):
            pass

        Handler.hub = hub
        self.server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_port}"
        threading.Thread(target=self.server.serve_forever, daemon=True).start()

    def put(
        self,
        content: bytes,
        filename: str,
        *,
        repository: str = "timm/resnet50.tv_in1k",
        commit: str = COMMIT,
    ) -> None:
        self.files[f"{repository}/{commit}/{filename}"] = content

    def close(self) -> None:
        self.server.shutdown()
        self.server.server_close()

    def commit_of(self, repository: str, revision: str) -> str:
        """Return the commit of a branch; commits are returned unchanged."""
        branches = self.branches.get(repository, {"main": self.main})
        return branches.get(revision, revision)

    def content(self, repository: str, revision: str = "main") -> dict[str, bytes]:
        """Return the files of a commit or branch by their paths."""
        start = f"{repository}/{self.commit_of(repository, revision)}/"
        return {name.removeprefix(start): data for name, data in self.files.items() if name.startswith(start)}

    def create(self, repository: str, *, private: bool = False) -> None:
        """Create a repository with the file that the Hub adds to each."""
        self.branches[repository] = {}
        if private:
            self.private.add(repository)
        self.commit(repository, "main", {".gitattributes": b"*.safetensors filter=lfs\n"}, [])

    def commit(self, repository: str, branch: str, added: dict[str, bytes], deleted: list[str]) -> str:
        before = self.content(repository, branch) if branch in self.branches[repository] else {}
        after = {name: data for name, data in before.items() if name not in deleted} | added
        parent = self.branches[repository].get(branch, "")
        text = repr((repository, parent, sorted((k, hashlib.sha1(v).hexdigest()) for k, v in after.items())))
        commit = hashlib.sha1(text.encode()).hexdigest()
        self.branches[repository][branch] = commit
        for name, data in after.items():
            self.put(data, name, repository=repository, commit=commit)
        return commit


class _Handler(BaseHTTPRequestHandler):
    hub: FakeHub

    def do_HEAD(self) -> None:
        self.download(with_body=False)

    def do_GET(self) -> None:
        if self.path.startswith("/api/models/"):
            self.describe_repository()
        else:
            self.download(with_body=True)

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        body = self.rfile.read(length)
        self.hub.uploads.append(f"POST {self.path}")
        if self.path == "/api/validate-yaml":
            self.validate(json.loads(body)["content"])
            return
        token = self.headers.get("Authorization", "").removeprefix("Bearer ")
        if token != TOKEN:
            self.answer_json({"error": "Invalid username or password."}, status=401)
        elif self.path == "/api/repos/create":
            self.create(json.loads(body))
        elif self.path.endswith("/info/lfs/objects/batch"):
            self.offer(json.loads(body)["objects"])
        else:
            _, _, _, owner, name, action, *rest = self.path.split("/")
            revision = unquote("/".join(rest))
            change = {"preupload": self.preupload, "commit": self.commit, "branch": self.branch}[action]
            change(f"{owner}/{name}", revision, body)

    def do_PUT(self) -> None:
        self.hub.uploads.append(f"PUT {self.path}")
        content = self.rfile.read(int(self.headers["Content-Length"]))
        oid = self.path.rpartition("/")[2]
        right = hashlib.sha256(content).hexdigest() == oid
        if right:
            self.hub.objects[oid] = content
        self.answer_json({}, status=200 if right else 400)

    def validate(self, card: str) -> None:
        start, front, text = card.split("---\n", 2)
        assert start == "" and text
        known = {"library_name", "pipeline_tag", "license", "tags"}
        wrong = sorted(set(yaml.safe_load(front)) - known)
        self.answer_json({"warnings": [], "errors": [{"message": name} for name in wrong]})

    def create(self, request: dict[str, Any]) -> None:
        repository = f"{request['organization']}/{request['name']}"
        if request["organization"] != OWNER:
            text = "You don't have the rights to create a model under this namespace"
            self.answer_json({"error": text}, status=403)
            return
        status = 409 if repository in self.hub.branches else 200
        if status == 200:
            self.hub.create(
                repository, private=request.get("visibility") == "private" or request.get("private", False)
            )
        self.answer_json({"url": f"{self.hub.url}/{repository}"}, status=status)

    def branch(self, repository: str, name: str, body: bytes) -> None:
        branches = self.hub.branches[repository]
        status = 409 if name in branches else 201
        branches.setdefault(name, branches["main"])
        for path, data in self.hub.content(repository).items():
            self.hub.put(data, path, repository=repository, commit=branches[name])
        self.answer_json({}, status=status)

    def preupload(self, repository: str, revision: str, body: bytes) -> None:
        modes = [
            {
                "path": file["path"],
                "uploadMode": "lfs" if file["path"].endswith(".safetensors") else "regular",
                "shouldIgnore": False,
            }
            for file in json.loads(body)["files"]
        ]
        self.answer_json({"files": modes})

    def offer(self, objects: list[dict[str, Any]]) -> None:
        offers = [
            item
            if item["oid"] in self.hub.objects
            else item | {"actions": {"upload": {"href": f"{self.hub.url}/lfs/{item['oid']}"}}}
            for item in objects
        ]
        self.answer_json({"transfer": "basic", "objects": offers})

    def commit(self, repository: str, revision: str, body: bytes) -> None:
        added, deleted = {}, []
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "header":
                self.hub.messages.append(value["summary"])
            elif line["key"] == "file":
                added[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                added[value["path"]] = self.hub.objects[value["oid"]]
            else:
                assert line["key"] == "deletedFile"
                deleted.append(value["path"])
        commit = self.hub.commit(repository, revision, added, deleted)
        url = f"{self.hub.url}/{repository}/commit/{commit}"
        self.answer_json({"success": True, "commitOid": commit, "commitUrl": url})

    def describe_repository(self) -> None:
        """Answer the client's query about a repository."""
        _, _, _, owner, name, *rest = self.path.partition("?")[0].split("/")
        repository, revision = f"{owner}/{name}", unquote(rest[1]) if rest else "main"
        branches = self.hub.branches.get(repository, {})
        if revision not in branches or self.is_hidden(repository):
            code = "RevisionNotFound" if branches else "RepoNotFound"
            self.answer_json({"error": code}, status=404, headers={"X-Error-Code": code})
            return
        content = self.hub.content(repository, revision)
        siblings = [{"rfilename": path, "size": len(data)} for path, data in content.items()]
        about = {"id": repository, "modelId": repository, "sha": branches[revision], "siblings": siblings}
        about |= {"config": json.loads(content.get("config.json", b"{}")), "cardData": {"license": "mit"}}
        self.answer_json({**about, "private": repository in self.hub.private, "tags": [], "downloads": 0})

    def is_hidden(self, repository: str) -> bool:
        right = self.headers.get("Authorization", "") == f"Bearer {TOKEN}"
        return repository in self.hub.private and not right

    def answer_json(self, value: Any, *, status: int = 200, headers: dict[str, str] | None = None) -> None:
        body = json.dumps(value).encode()
        self.send_response(status)
        for key, text in (headers or {}).items():
            self.send_header(key, text)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def download(self, *, with_body: bool) -> None:
        hub = self.hub
        if hub.gone:
            self.close_connection = True
            return
        if "/api/" not in self.path:  # not a query about the client's account
            hub.requests.append(f"{self.command} {self.path}")
        from_storage = self.path.startswith("/storage/")
        path = self.path.removeprefix("/storage").replace("/resolve/", "/").lstrip("/")
        owner, repository, revision, file = [*path.split("/", 3), "", "", ""][:4]
        repository = f"{owner}/{repository}"
        commit = hub.commit_of(repository, unquote(revision))
        name = f"{repository}/{commit}/{file}"
        content = hub.files.get(name)
        if content is None or (self.is_hidden(repository) and not from_storage):
            self.refuse(repository, commit)
            return
        etag = f'"{hashlib.sha256(content).hexdigest()}"'
        size, range_header = len(content), self.headers.get("Range", "")
        begin = int(range_header.removeprefix("bytes=").rstrip("-")) if range_header and from_storage else 0
        body = content[begin:]
        self.send_response((206 if begin else 200) if from_storage else 302)
        self.send_header("ETag", etag)
        self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", str(len(body)) if from_storage else "0")
        if begin:
            hub.ranges.append(range_header)
            self.send_header("Content-Range", f"bytes {begin}-{size - 1}/{size}")
        if not from_storage:
            self.send_header("X-Linked-ETag", etag)
            self.send_header("X-Linked-Size", str(len(content)))
            self.send_header("Location", f"{hub.url}/storage/{name}")
        self.end_headers()
        if from_storage and with_body:
            cut = hub.cuts.pop(0) if hub.cuts else len(body)
            self.wfile.write(body[:cut])
            if cut < len(body):
                hub.gone, self.close_connection = hub.gone_after_cut, True

    def refuse(self, repository: str, commit: str) -> None:
        hidden = self.is_hidden(repository)
        exists = any(name.startswith(f"{repository}/") for name in self.hub.files) and not hidden
        known = exists and any(name.startswith(f"{repository}/{commit}/") for name in self.hub.files)
        code = "EntryNotFound" if known else "RevisionNotFound" if exists else "RepoNotFound"
        self.send_response(404)
        self.send_header("X-Error-Code", code)
        if known:
            self.send_header("X-Repo-Commit", commit)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *args: object) -> None:
        pass


def environment(
    home: Path, endpoint: str, *, offline: bool = False, token: str | None = None
) -> dict[str, str]:
    """Return the environment of a process that uses this server and its own cache."""
    inherited = {
        k: v
        for k, v in os.environ.items()
        if not k.startswith(("HF_", "CAPVID_")) and "proxy" not in k.lower()
    }
    settings = {"HF_HOME": str(home), "HF_ENDPOINT": endpoint, "HF_HUB_OFFLINE": str(int(offline))}
    settings |= {"CAPVID_CACHE": str(home / "capvid"), "OMP_NUM_THREADS": "1", "NO_PROXY": "*"}
    settings |= {"HF_TOKEN": token} if token else {}
    return inherited | settings | {"HF_HUB_DISABLE_XET": "1"}


def capvid(
    *arguments: object,
    home: Path,
    endpoint: str,
    offline: bool = False,
    token: str | None = TOKEN,
    models: Path | None = None,
    anew: bool = False,
) -> tuple[int, str, str]:
    """Run the command in a separate process; return its exit code, stdout and stderr.

    With ``anew`` the process is a new interpreter, which takes some seconds more.
    """
    settings = environment(home / "hf", endpoint, offline=offline, token=token)
    settings |= {"CAPVID_MODELS": str(models)} if models else {}
    if anew:
        command = [sys.executable, "-m", "capvid", *map(str, arguments)]
        completed = subprocess.run(
            command, capture_output=True, text=True, env=settings, cwd=home, timeout=200
        )
    else:
        completed = forked.run(None, arguments, env=settings, cwd=home)
    assert "Traceback" not in completed.stderr and TOKEN not in completed.stdout + completed.stderr
    return completed.returncode, completed.stdout, completed.stderr

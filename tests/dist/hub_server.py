"""A server that answers huggingface_hub's client as the Hub does, for one repository that it keeps in memory."""

from __future__ import annotations

import base64
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


class Hub:
    """What clients have done: the commits in order, and the files after the last one."""

    def __init__(self) -> None:
        self.files: dict[str, bytes] = {}
        self.commits: list[str] = []
        self.created: list[dict[str, Any]] = []
        self.failing = 0
        """How many of the next commits are refused."""
        self.url = ""

    def answer(self, method: str, path: str, body: bytes) -> tuple[int, Any]:
        path = path.partition("?")[0]
        if path == "/api/repos/create":
            self.created.append(json.loads(body))
            return 200, {"url": f"{self.url}/me/model", "name": "me/model"}
        if path.endswith("/preupload/main"):
            files = json.loads(body)["files"]
            return 200, {"files": [{"path": f["path"], "uploadMode": "regular", "shouldIgnore": False} for f in files]}
        if "/tree/main" in path:
            entries = [{"type": "file", "path": p, "size": len(c), "oid": "0"} for p, c in self.files.items()]
            return 200, entries
        if path.endswith("/commit/main"):
            return self.commit([json.loads(line) for line in body.splitlines()])
        if method == "GET" and path.startswith("/api/models/"):
            siblings = [{"rfilename": p} for p in self.files]
            return 200, {"id": "me/model", "sha": "0" * 40, "siblings": siblings, "private": True}
        return 404, {"error": f"{method} {path}"}

    def commit(self, lines: list[dict[str, Any]]) -> tuple[int, Any]:
        if self.failing:
            self.failing -= 1
            return 403, {"error": "no"}
        for line in lines:
            value = line["value"]
            if line["key"] == "header":
                self.commits.append(value["summary"])
            elif line["key"] == "file":
                self.files[value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "deletedFile":
                del self.files[value["path"]]
        oid = "0" * 40
        return 200, {"commitUrl": f"{self.url}/me/model/commit/{oid}", "commitOid": oid, "success": True}


@contextmanager
def serving() -> Iterator[Hub]:
    """A hub at ``hub.url``, on this host."""
    hub = Hub()

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
            status, answer = hub.answer(self.command, self.path, body)
            text = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(text)))
            self.end_headers()
            self.wfile.write(text)

        do_GET = do_HEAD = do_POST  # noqa: N815

        def log_message(self, *_: Any) -> None:
            """Print nothing."""

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_port}"
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()

"""A registry for the tests of the registry client: the part of OCI Distribution that clients need, in memory."""

import base64
import hashlib
import json
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from urllib.parse import parse_qs, urlsplit

TOKEN = "token-of-the-test"  # noqa: S105


class State:
    """The content of the registry, and its authentication: none, `basic` or `bearer`."""

    def __init__(self, credentials: str = "") -> None:
        self.credentials = credentials
        self.blobs: dict[str, bytes] = {}
        self.manifests: dict[tuple[str, str], tuple[bytes, str]] = {}
        self.uploads = 0
        self.scopes: list[str] = []
        self.address = ""

    def digest(self, name: str, tag: str) -> str:
        return f"sha256:{hashlib.sha256(self.manifests[name, tag][0]).hexdigest()}"


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    state: State

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002
        pass

    def answer(self, status: int, content: bytes = b"", **headers: str) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(content)

    def authorized(self) -> bool:
        kind = self.state.credentials
        basic = f"Basic {base64.b64encode(b'user:secret').decode()}"
        if urlsplit(self.path).path == "/token":
            if self.headers["Authorization"] != basic:
                self.answer(401)
                return False
            self.state.scopes += parse_qs(urlsplit(self.path).query)["scope"]
            self.answer(200, json.dumps({"token": TOKEN}).encode())
            return False
        expected = {"": None, "basic": basic, "bearer": f"Bearer {TOKEN}"}[kind]
        if expected is None or self.headers["Authorization"] == expected:
            return True
        self.rfile.read(int(self.headers["Content-Length"] or 0))
        realm = f'Bearer realm="http://{self.state.address}/token",service="test"'
        self.answer(401, WWW_Authenticate='Basic realm="test"' if kind == "basic" else realm)
        return False

    def do_GET(self) -> None:
        if not self.authorized():
            return
        if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", self.path):
            content, media_type = self.state.manifests.get((found[1], found[2]), (b"", ""))
            self.answer(200 if media_type else 404, content, Content_Type=media_type or "text/plain")
        elif found := re.fullmatch(r"/v2/(.+)/blobs/(sha256:[0-9a-f]+)", self.path):
            content = self.state.blobs.get(found[2])
            self.answer(404 if content is None else 200, content or b"")
        else:
            self.answer(404)

    def do_HEAD(self) -> None:
        self.do_GET()

    def do_POST(self) -> None:
        if self.authorized():
            self.state.uploads += 1
            self.answer(202, Location=f"{self.path}{self.state.uploads}?state=x")

    def do_PUT(self) -> None:
        if not self.authorized():
            return
        content = self.rfile.read(int(self.headers["Content-Length"]))
        parts = urlsplit(self.path)
        digest = f"sha256:{hashlib.sha256(content).hexdigest()}"
        if found := re.fullmatch(r"/v2/(.+)/manifests/([^/]+)", parts.path):
            children = json.loads(content)
            needed = [each["digest"] for each in children.get("layers", [])]
            if any(each not in self.state.blobs for each in needed):
                self.answer(400, b"MANIFEST_BLOB_UNKNOWN")
                return
            self.state.manifests[found[1], found[2]] = (content, self.headers["Content-Type"])
            self.answer(201)
        elif parse_qs(parts.query)["digest"] == [digest]:
            self.state.blobs[digest] = content
            self.answer(201)
        else:
            self.answer(400, b"DIGEST_INVALID")


@contextmanager
def serving(credentials: str = "") -> Iterator[State]:
    """Serves a registry at a loopback port."""
    state = State(credentials)
    handler = type("RegistryHandler", (Handler,), {"state": state})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    state.address = f"127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, args=(0.02,))
    thread.start()
    try:
        yield state
    finally:
        server.shutdown()
        thread.join()
        server.server_close()

"""Servers of files, on a port of this machine, which may cut a connection off."""

from __future__ import annotations

import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread


class FileHandler(BaseHTTPRequestHandler):
    """Answers HEAD as GET, which a derived class answers."""

    protocol_version = "HTTP/1.1"

    def do_HEAD(self) -> None:
        self.do_GET()  # type: ignore[attr-defined]

    def answer(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None, cut: int = 0) -> None:
        """Cuts the connection after that many bytes of the body, if not 0."""
        self.send_response(status)
        for name, value in {"content-length": str(len(body)), **(headers or {})}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command == "GET":
            self.wfile.write(body[:cut] if cut else body)
        self.close_connection = bool(cut)

    def answer_range(self, body: bytes, headers: dict[str, str], cut: int) -> None:
        """The bytes that are asked for."""
        asked = re.findall(r"bytes=(\d+)-", self.headers.get("range", ""))
        begin = int(asked[0]) if asked else 0
        if begin:
            headers = {**headers, "content-range": f"bytes {begin}-{len(body) - 1}/{len(body)}"}
        self.answer(206 if begin else 200, body[begin:], headers, cut)

    def log_message(self, *_: object) -> None: ...


@contextmanager
def serving(handler: type[BaseHTTPRequestHandler]) -> Iterator[str]:
    """The address of a server."""
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        try:
            yield f"http://127.0.0.1:{server.server_port}"
        finally:
            server.shutdown()

"""An HTTP server for files that can be as unhelpful as real ones: it cuts, refuses and forgets ranges."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class FileServer(ThreadingHTTPServer):
    """Serves `files` by path. Set the other attributes to make it misbehave."""

    daemon_threads = True

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.files: dict[str, bytes] = {}
        self.headers: dict[str, dict[str, str]] = {}  # more headers, by path
        self.requests: list[tuple[str, str, str | None]] = []  # (method, path, Range)
        self.cut_after: int | None = None  # end the connection after so many bytes, once
        self.ranges = True
        self.refused_agents: tuple[str, ...] = ()  # user agents that get a 403
        self.failure: tuple[int, dict[str, str]] | None = None  # status and headers of every answer

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_address[1]}"


class _Handler(BaseHTTPRequestHandler):
    server: FileServer
    protocol_version = "HTTP/1.1"

    def do_GET(self) -> None:
        self._answer(send_body=True)

    def do_HEAD(self) -> None:
        self._answer(send_body=False)

    def _answer(self, *, send_body: bool) -> None:
        path = self.path.partition("?")[0]
        wanted = self.headers.get("Range")
        self.server.requests.append((self.command, path, wanted))
        if self.headers.get("User-Agent", "").startswith(self.server.refused_agents or "\0"):
            self._start(403, 0)
        elif self.server.failure is not None:
            self._start(self.server.failure[0], 0, self.server.failure[1])
        elif path not in self.server.files:
            self._start(404, 0)
        else:
            self._send(path, wanted, send_body=send_body)

    def _send(self, path: str, wanted: str | None, *, send_body: bool) -> None:
        content = self.server.files[path]
        extra = dict(self.server.headers.get(path, {}))
        start = int(wanted.removeprefix("bytes=").partition("-")[0]) if wanted and self.server.ranges else 0
        if start >= len(content) > 0:
            self._start(416, 0)
            return
        if start:
            extra["Content-Range"] = f"bytes {start}-{len(content) - 1}/{len(content)}"
        self._start(206 if start else 200, len(content) - start, extra)
        if not send_body:
            return
        body = content[start:]
        if self.server.cut_after is not None:
            body, self.server.cut_after = body[: self.server.cut_after], None
            self.close_connection = True
        self.wfile.write(body)

    def _start(self, status: int, length: int, extra: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in {"Content-Length": str(length), **(extra or {})}.items():
            self.send_header(name, value)
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Tests read `requests` instead."""


@contextmanager
def serving() -> Iterator[FileServer]:
    with FileServer() as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield server
        finally:
            server.shutdown()
            thread.join()

"""A small OpenAI-compatible server on loopback, whose every answer a test decides."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from agentrl.chat.context import Message
from agentrl.config.schema import JudgeConfig
from agentrl.scoring.client import Call

Answer = tuple[int, Any] | tuple[int, Any, Mapping[str, str]]
"""Status and body: text becomes a chat completion's, a mapping goes out as JSON, bytes as they are."""


class FakeServer:
    """Serves `/v1/chat/completions` in threads. `script` maps the number of a request and its body to an answer."""

    def __init__(self, script: Callable[[int, dict[str, Any]], Answer], delay_s: float = 0.0) -> None:
        self.script = script
        self.delay_s = delay_s
        self.requests: list[dict[str, Any]] = []
        self.headers: list[dict[str, str]] = []
        self.lock = threading.Lock()
        self.in_flight = 0
        self.most_in_flight = 0
        self.http = _Server(("127.0.0.1", 0), _handler(self))

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http.server_address[1]}/v1"

    def prompts(self) -> list[str]:
        return ["\n".join(m["content"] for m in body["messages"]) for body in self.requests]


class Window:
    """A script that answers the oldest request only once `limit` are there at a time, or all `total` have come.

    Whoever leaves a place empty while calls wait, or sends by batches, gets no answer: HTTP 500 after `patience_s`.
    """

    def __init__(self, limit: int, total: int, content: str, patience_s: float = 60.0) -> None:
        self.limit, self.total, self.content, self.patience_s = limit, total, content, patience_s
        self.held: list[int] = []
        self.arrived = 0
        self.changed = threading.Condition()

    def __call__(self, number: int, body: dict[str, Any]) -> Answer:
        with self.changed:
            self.arrived += 1
            self.held.append(number)
            self.changed.notify_all()
            served = self.changed.wait_for(lambda: self._turn(number), self.patience_s)
            self.held.remove(number)
            self.changed.notify_all()
        return (200, self.content) if served else (500, "a place was empty")

    def _turn(self, number: int) -> bool:
        full = len(self.held) >= self.limit or self.arrived == self.total
        return full and self.held[0] == number


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512


def completion(text: Any, prompt_tokens: int = 10, completion_tokens: int = 5, finish: str = "stop") -> dict[str, Any]:
    return {
        "id": "x",
        "object": "chat.completion",
        "created": 0,
        "model": "fake",
        "choices": [{"index": 0, "finish_reason": finish, "message": {"role": "assistant", "content": text}}],
        "usage": {
            "prompt_tokens": prompt_tokens,
            "completion_tokens": completion_tokens,
            "total_tokens": prompt_tokens + completion_tokens,
        },
    }


def _handler(fake: FakeServer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"
        disable_nagle_algorithm = True
        wbufsize = -1

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with fake.lock:
                number = len(fake.requests)
                fake.requests.append(body)
                fake.headers.append({k.lower(): v for k, v in self.headers.items()})
                fake.in_flight += 1
                fake.most_in_flight = max(fake.most_in_flight, fake.in_flight)
            try:
                time.sleep(fake.delay_s)
                status, content, *headers = fake.script(number, body)
            finally:
                with fake.lock:
                    fake.in_flight -= 1
            if isinstance(content, str):
                content = completion(content)
            raw = content if isinstance(content, bytes) else json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(raw)))
            for key, value in (headers[0] if headers else {}).items():
                self.send_header(key, value)
            self.end_headers()
            self.wfile.write(raw)

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


@contextmanager
def serving(script: Callable[[int, dict[str, Any]], Answer], delay_s: float = 0.0) -> Iterator[FakeServer]:
    fake = FakeServer(script, delay_s)
    thread = threading.Thread(target=fake.http.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        fake.http.shutdown()
        fake.http.server_close()
        thread.join()


def judge_config(url: str, **changes: Any) -> JudgeConfig:
    return JudgeConfig(**{"model": "fake", "base_url": url, "backoff_s": 0.0, "timeout_s": 10.0} | changes)


def say(text: str, repeat: int = 0) -> Call:
    return Call((Message("user", text, trusted=True),), '{"type": "object", "properties": {"n": {}}}', repeat)

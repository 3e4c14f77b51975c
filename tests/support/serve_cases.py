"""A server in a child process, started as users start it, and a simple client, for the tests of `serve`."""

import contextlib
import http.client
import json
import os
import re
import subprocess
import threading
import time
from pathlib import Path

from laneformer import custom_calls
from tests.support.paths import PYTHON, ROOT

BACKEND = "xla" if custom_calls.unavailable() else "cpu"
JSON = {"Content-Type": "application/json"}


class Server:
    """`python -m infer serve` on a free port."""

    patience = 60  # seconds that a client waits for the next bytes

    def __init__(self, checkpoint, *args, key=None, program=("-m", "infer"), environment=os.environ):
        env = {**environment, **({"LANEFORMER_API_KEY": key} if key else {})}
        command = [*PYTHON, *program, "serve", "--checkpoint", str(checkpoint), "--port", "0", *map(str, args)]
        self.process = subprocess.Popen(command, cwd=ROOT, env=env, stderr=subprocess.PIPE, text=True, encoding="utf-8")
        first = self.process.stderr.readline()
        found = re.search(r"http://127\.0\.0\.1:(\d+): loading", first)
        assert found, first + self.process.stderr.read()
        self.port = int(found[1])

    def wait_until(self, status):
        """Waits until GET /health returns this status code. Returns the server."""
        ends = time.monotonic() + 300  # long enough for a busy machine
        while (answer := self.get("/health"))[0] != status:
            assert self.process.poll() is None and time.monotonic() < ends, answer
            time.sleep(0.02)
        return self

    def connect(self, method, path, body=None, headers=None):
        """Sends a request. Returns the connection and the response, whose body is still unread."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=self.patience)
        connection.request(method, path, body, headers or {})
        return connection, connection.getresponse()

    def get(self, path, headers=None):
        return self.send("GET", path, None, headers)

    def send(self, method, path, body=None, headers=None):
        """Sends a request. Returns the status code, the body (parsed if it is JSON) and the headers."""
        connection, response = self.connect(method, path, body, headers)
        with contextlib.closing(connection):
            data = response.read()
            is_json = response.headers.get("content-type") == "application/json"
            return response.status, json.loads(data) if is_json else data.decode(), response.headers

    def post(self, path, headers=None, **fields):
        """Sends the fields as JSON. Returns the status code and the body."""
        return self.send("POST", path, json.dumps(fields), {**JSON, **(headers or {})})[:2]

    def complete(self, prompt, **fields):
        status, body = self.post("/v1/completions", prompt=prompt, **fields)
        assert status == 200, body
        return body

    @contextlib.contextmanager
    def stream(self, path="/v1/completions", headers=None, **fields):
        """Sends a request for a stream. Yields an iterator over its events: comments as text, parsed JSON, "[DONE]"."""
        connection, response = self.connect(
            "POST", path, json.dumps({**fields, "stream": True}), {**JSON, **(headers or {})}
        )
        with contextlib.closing(connection), response:
            assert response.status == 200, response.read()
            assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
            yield events(response)

    def metric(self, name):
        """Value of a metric, 0 if the server does not report it. The name includes the labels."""
        found = re.search(rf"^laneformer_{re.escape(name)} (.*)$", self.get("/metrics")[1], re.MULTILINE)
        return 0.0 if found is None else float(found[1])

    def wait_for_metric(self, name, value):
        ends = time.monotonic() + 30
        while self.metric(name) != value:
            assert time.monotonic() < ends, (name, self.metric(name))
            time.sleep(0.01)

    def children(self):
        """Process ids of the server's engines."""
        ids = [int(n) for n in Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text().split()]
        return [n for n in ids if b"spawn_main" in Path(f"/proc/{n}/cmdline").read_bytes()]

    def end(self, number):
        """Sends a signal. Returns the exit status, the remaining stderr, and the seconds until the server ended."""
        began = time.monotonic()
        self.process.send_signal(number)
        _, err = self.process.communicate(timeout=30)
        return self.process.returncode, err, time.monotonic() - began

    def kill(self):
        self.process.kill()
        self.process.communicate()


def all_together(work, count):
    """Runs work(number) for numbers below `count` in threads. Raises the first exception that one of them raised."""
    errors = []

    def run(number):
        try:
            work(number)
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(number,)) for number in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def events(response):
    """Server-sent events of a response, each of which ends with an empty line."""
    while line := response.readline().decode():
        assert response.readline() == b"\n"
        line = line.removesuffix("\n")
        if line.startswith(":"):
            yield line
        else:
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)

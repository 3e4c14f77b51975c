"""A server with OpenAI's API that gives scripted answers, for the tests of `agent`."""

import json
import threading
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Scripted:
    """Serves one answer per request, in order. An answer is a text, streamed in pieces of 40 characters, a list of tool
    calls (name, arguments), or an error (status, error). Use it in a `with` block.

    `requests` receives the body of each request, and "gone" when the client disconnects during an answer.
    """

    def __init__(
        self, *answers, models=("scripted",), chat=True, pause=0.0, usage=True, key=None, metrics=None, cached=None,
        tools=None,
    ):  # fmt: skip
        """pause: seconds before the first piece; the other pieces follow after half as long. key: the API key that GET
        requires. metrics, cached: metrics and number of cached tokens that the last chunk reports.
        """
        self.cached = cached
        self.answers, self.requests, self.pause, self.usage, self.metrics = list(answers), [], pause, usage, metrics
        outer = self

        class Handler(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.0"  # a stream ends with its connection

            def log_message(self, *_):
                pass

            def do_GET(self):
                if key is not None and self.headers["Authorization"] != f"Bearer {key}":
                    self.send_json(401, {"error": {"message": "no such key"}})
                elif models is None:
                    self.send_json(404, {"error": {"message": "no list"}})
                else:
                    self.send_json(
                        200,
                        {
                            "object": "list",
                            "data": [{"id": name, "object": "model", "chat": chat, "tools": tools} for name in models],
                        },
                    )

            def send_json(self, status, body):
                data = json.dumps(body).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                self.end_headers()
                self.wfile.write(data)

            def do_POST(self):
                asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
                outer.requests.append(asked)
                answer = outer.answers.pop(0)
                if isinstance(answer, tuple):
                    self.send_json(answer[0], {"error": answer[1]})
                    return
                self.send_response(200)
                self.send_header("Content-Type", "text/event-stream")
                self.end_headers()
                try:
                    outer.stream(self, answer, chat="messages" in asked)
                except ConnectionError:
                    outer.requests.append("gone")

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_port}/v1"

    def stream(self, handler, text, chat):
        def event(choices, **more):
            body = {
                "id": "1",
                "object": "chat.completion.chunk" if chat else "text_completion",
                "created": 0,
                "model": "scripted",
                "choices": choices,
                **more,
            }
            handler.wfile.write(f"data: {json.dumps(body)}\n\n".encode())
            handler.wfile.flush()

        def choice(piece, reason=None):
            content = {"delta": {"content": piece} if piece else {}} if chat else {"text": piece}
            return [{"index": 0, **content, "finish_reason": reason}]

        calls, text = ("", text) if isinstance(text, str) else (text, "")
        for n, (name, arguments) in enumerate(calls):
            for function in ({"name": name, "arguments": ""}, {"arguments": arguments}):
                call = {
                    "index": n,
                    "function": function,
                    **({"id": f"c{n}", "type": "function"} if "name" in function else {}),
                }
                event([{"index": 0, "delta": {"tool_calls": [call]}, "finish_reason": None}])
        pieces = [text[at : at + 40] for at in range(0, len(text), 40)]
        for n, piece in enumerate(pieces):
            time.sleep(self.pause / (2 if n else 1))
            event(choice(piece))
        event(choice("", "stop"))
        if self.usage:
            usage = {"prompt_tokens": 7, "completion_tokens": 10 * len(pieces), "total_tokens": 7 + 10 * len(pieces)}
            if self.cached is not None:
                usage["prompt_tokens_details"] = {"cached_tokens": self.cached}
            event([], usage=usage, **({"metrics": self.metrics} if self.metrics else {}))
        handler.wfile.write(b"data: [DONE]\n\n")

    def __enter__(self):
        threading.Thread(target=self._server.serve_forever, args=(0.01,), daemon=True).start()
        return self

    def __exit__(self, *_):
        self._server.shutdown()
        self._server.server_close()

"""What GET /metrics tells Prometheus; names are vLLM's with another prefix, so that its dashboards need little
change.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

PREFIX = "laneformer_"
# A fast decoder draws a token in some hundred microseconds: buckets that begin at milliseconds would show nothing.
BETWEEN_TOKENS = (
    50e-6,
    100e-6,
    200e-6,
    300e-6,
    400e-6,
    500e-6,
    750e-6,
    1e-3,
    1.5e-3,
    2e-3,
    5e-3,
    10e-3,
    20e-3,
    50e-3,
    0.1,
    0.2,
    0.5,
    1,
)
REQUESTS = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


class Metrics:
    """The counters of one server."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.running = self._of(Gauge, "num_requests_running", "Requests that the engine works on")
        self.waiting = self._of(Gauge, "num_requests_waiting", "Requests in the queue")
        self.queue_time = self._of(
            Histogram, "request_queue_time_seconds", "From arrival until the engine took it", buckets=REQUESTS
        )
        self.first_token = self._of(
            Histogram, "time_to_first_token_seconds", "From then to the first token", buckets=REQUESTS
        )
        self.between_tokens = self._of(
            Histogram,
            "inter_token_latency_seconds",
            "Between tokens; those that came together share the time since the last ones",
            buckets=BETWEEN_TOKENS,
        )
        self.whole = self._of(
            Histogram, "e2e_request_latency_seconds", "From arrival to the last token", buckets=REQUESTS
        )
        self.prompt_tokens = self._of(Counter, "prompt_tokens", "Tokens of prompts that were answered")
        self.generation_tokens = self._of(Counter, "generation_tokens", "Tokens generated")
        self.success = self._of(
            Counter, "request_success", "Answers that reached their end", labelnames=("finished_reason",)
        )
        self.failure = self._of(
            Counter,
            "request_failure",
            "Requests that did not: cancelled, timeout, queue_full, refused, error",
            labelnames=("reason",),
        )
        self.restarts = self._of(
            Counter, "engine_restarts", "Times that the engine's process ended and was started again"
        )

        self._together: tuple[float, float, int] | None = (
            None  # the newest tokens: arrival of those before, theirs, how many
        )

    def token(self, time: float) -> None:
        """A token of the running answer came, so many seconds after the engine took the request."""
        self.generation_tokens.inc()
        if self._together is None:
            self.first_token.observe(time)
            self._together = (time, time, 0)
            return
        before, newest, count = self._together
        if time > newest:
            self._observe()
            before, count = newest, 0
        self._together = (before, time, count + 1)

    def no_more_tokens(self) -> None:
        """The running answer has ended."""
        if self._together is not None:
            self._observe()
            self._together = None

    def _observe(self) -> None:
        before, newest, count = self._together
        for _ in range(count):
            self.between_tokens.observe((newest - before) / count)

    def _of(self, kind: type, name: str, what: str, **options):
        return kind(PREFIX + name, what, registry=self.registry, **options)

    def text(self) -> bytes:
        """All of it in Prometheus's text format."""
        return generate_latest(self.registry)

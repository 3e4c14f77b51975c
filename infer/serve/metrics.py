"""The metrics of GET /metrics for Prometheus. They have vLLM's names with another prefix, so that its dashboards can be
used.
"""

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest

from laneformer.infer.serve.worker import Drafting

PREFIX = "laneformer_"
# A fast decoder draws a token in some hundred microseconds. Common buckets start at milliseconds, so these start lower.
BETWEEN_TOKENS = (
    *(50e-6, 100e-6, 200e-6, 300e-6, 400e-6, 500e-6, 750e-6),
    *(1e-3, 1.5e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1),
)
ROWS = (1, 2, 3, 4, 6, 8, 12, 16, 32)
REQUESTS = (1e-3, 2e-3, 5e-3, 10e-3, 20e-3, 50e-3, 0.1, 0.2, 0.5, 1, 2, 5, 10, 20, 50, 100, 200)


class Metrics:
    """The metrics of one server."""

    def __init__(self):
        self.registry = CollectorRegistry()
        self.running = self._of(Gauge, "num_requests_running", "Requests being generated")
        self.waiting = self._of(Gauge, "num_requests_waiting", "Requests in the queue")
        self.cache_usage = self._of(
            Gauge, "kv_cache_usage_perc", "Positions of running requests as a share of those that fit, 0 to 1"
        )
        self.queue_time = self._of(
            Histogram, "request_queue_time_seconds", "Time from arrival to the start in the engine", buckets=REQUESTS
        )
        self.first_token = self._of(
            Histogram,
            "time_to_first_token_seconds",
            "Time from the start in the engine to the first token",
            buckets=REQUESTS,
        )
        self.between_tokens = self._of(
            Histogram,
            "inter_token_latency_seconds",
            "Time between tokens; tokens that arrived together share the time since the previous ones",
            buckets=BETWEEN_TOKENS,
        )
        self.whole = self._of(
            Histogram, "e2e_request_latency_seconds", "Time from arrival to the last token", buckets=REQUESTS
        )
        self.prompt_tokens = self._of(Counter, "prompt_tokens", "Prompt tokens of completed answers")
        self.prefix_queries = self._of(
            Counter, "prefix_cache_queries", "Prompt tokens of completed answers that were looked up in kept prefixes"
        )
        self.prefix_hits = self._of(
            Counter, "prefix_cache_hits", "Prompt tokens of completed answers found in kept prefixes"
        )
        self.drafts = self._of(Counter, "spec_decode_num_drafts", "Passes that checked drafts")
        self.draft_tokens = self._of(Counter, "spec_decode_num_draft_tokens", "Drafted tokens that were checked")
        self.accepted = self._of(Counter, "spec_decode_num_accepted_tokens", "Drafted tokens that were correct")
        self.accepted_at = self._of(
            Counter,
            "spec_decode_num_accepted_tokens_per_pos",
            "Drafted tokens that were correct, by their position in a pass, from 0",
            labelnames=("position",),
        )
        self.pass_rows = self._of(
            Histogram, "pass_rows", "Rows of each pass after the prompt: a token and its drafts", buckets=ROWS
        )
        self.generation_tokens = self._of(Counter, "generation_tokens", "Generated tokens")
        self.success = self._of(Counter, "request_success", "Completed answers", labelnames=("finished_reason",))
        self.failure = self._of(
            Counter,
            "request_failure",
            "Failed requests: cancelled, timeout, queue_full, refused, error",
            labelnames=("reason",),
        )
        self.restarts = self._of(Counter, "engine_restarts", "Restarts of the engine process")
        self.lost_lines = self._of(Gauge, "log_lines_lost", "Lines of the log that could not be written")

    def passes(self, drafting: Drafting) -> None:
        """Counts the passes of an answer and their drafts."""
        self.drafts.inc(drafting.drafts)
        self.draft_tokens.inc(drafting.drafted)
        self.accepted.inc(sum(drafting.accepted))
        for position, count in enumerate(drafting.accepted):
            self.accepted_at.labels(position).inc(count)
        for rows, count in enumerate(drafting.rows, start=1):
            for _ in range(count):
                self.pass_rows.observe(rows)

    def _of(self, kind: type, name: str, what: str, **options):
        return kind(PREFIX + name, what, registry=self.registry, **options)

    def text(self) -> bytes:
        """All metrics in Prometheus's text format."""
        return generate_latest(self.registry)


class TokenTimes:
    """Counts the tokens of one answer for the metrics."""

    def __init__(self, metrics: Metrics):
        self._metrics = metrics
        # The newest tokens that arrived together: arrival of the tokens before them, their own arrival, their number.
        self._together: tuple[float, float, int] | None = None

    def add(self, time: float) -> None:
        """Counts a token. time: seconds since the engine started the request."""
        self._metrics.generation_tokens.inc()
        if self._together is None:
            self._metrics.first_token.observe(time)
            self._together = (time, time, 0)
            return
        before, newest, count = self._together
        if time > newest:
            self.end()
            before, count = newest, 0
        self._together = (before, time, count + 1)

    def end(self) -> None:
        """Counts the last tokens that arrived together."""
        before, newest, count = self._together or (0, 0, 0)
        for _ in range(count):
            self._metrics.between_tokens.observe((newest - before) / count)
        self._together = None

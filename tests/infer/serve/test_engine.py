"""The engine process from outside: one that dies, hangs or lacks memory never blocks the event loop."""

import asyncio
import json
import time
from types import SimpleNamespace

import pytest

from laneformer.infer.serve import engine as engine_module
from laneformer.infer.serve import worker
from laneformer.infer.serve.body import ApiError
from laneformer.infer.serve.engine import EngineProcess, Limits
from laneformer.infer.serve.metrics import Metrics
from laneformer.infer.serve.processes.scarcity import is_scarcity
from laneformer.infer.serve.protocol import read_call
from tests.support.serving import bad_engines


async def until(condition):
    """Waits until a condition holds. Returns the longest time that the event loop was blocked."""
    longest, ends = 0.0, time.monotonic() + 60
    while not condition():
        began = time.monotonic()
        await asyncio.sleep(0.005)
        longest = max(longest, time.monotonic() - began)
        assert began < ends
    return longest


@pytest.fixture
def start(monkeypatch):
    """A function that runs a test with an engine process that has another main function, and with its ends."""
    monkeypatch.setattr(engine_module, "LONGEST_PAUSE", 0.01)
    monkeypatch.setattr(engine_module, "PING_SECONDS", 0.05)
    monkeypatch.setattr(engine_module, "SILENT_SECONDS", 0.3)

    def start(test, main, waiting=16, **options):
        monkeypatch.setattr(worker, "main", main)
        ends = []
        model = SimpleNamespace(engine=SimpleNamespace(distributed=False, **options))

        async def run():
            limits = Limits(waiting, 60.0, None)
            made = EngineProcess(model, limits, Metrics(), end=lambda: ends.append(time.monotonic()))
            made.start()
            try:
                await test(made, ends)
            finally:
                await made.close()

        asyncio.run(run())

    return start


def test_engine_that_dies_when_it_is_ready_is_given_up(start, caplog):
    async def run(made, ends):
        await until(lambda: ends)
        assert made.state == "stopped" and len(ends) == 1
        line = "the engine process ended unexpectedly (exit code 3)"
        assert made.failure == f"{line}; it ended {engine_module.MOST_CRASHES} times in a row"
        assert "laneformer_engine_restarts_total 4.0" in made._metrics.text().decode()

    start(run, bad_engines.dies_when_ready)


def test_lack_of_memory_is_one_line(start, capfd):
    async def run(made, ends):
        await until(lambda: ends)
        assert "ran out of memory or threads (signal SIGABRT)" in made.failure and "\n" not in made.failure

    start(run, bad_engines.lacks_memory)
    assert capfd.readouterr().err == ""


def test_failure_while_loading_shows_the_output_once(start, capfd):
    async def run(made, ends):
        await until(lambda: ends)
        assert made.failure.startswith("the engine process ended unexpectedly (signal SIGABRT) while it loaded")

    start(run, bad_engines.fails_to_load)
    assert sorted(capfd.readouterr().err.splitlines()) == ["a library's line", "a line of the log"]


def test_silent_engine_blocks_nothing_and_is_reported(start):
    call = read_call({"prompt": "a" * 1_000_000}, chat=False)

    async def run(made, ends):
        await until(lambda: made.state == "ready")
        began = time.monotonic()
        asking = [asyncio.create_task(made.submit([call], f"client {i}")) for i in range(12)]
        assert await until(lambda: made.state == "silent") < 1 and made._run.unsent > 1 << 20
        assert time.monotonic() - began < 2
        with pytest.raises(ApiError) as caught:
            await made.submit([call], "client")
        assert caught.value.status == 503 and caught.value.body["error"]["code"] == "engine_silent"
        await until(lambda: made.state == "ready")
        asking[-1].cancel()
        jobs = await asyncio.gather(*asking, return_exceptions=True)
        await until(lambda: made._run.unsent == 0)
        found = [job for job in jobs if isinstance(job, list)]
        assert all(job.ids == [1] * 100_000 for [job] in found)
        assert not ends

    start(run, bad_engines.reads_nothing, waiting=100, seconds=2.0)


def test_clients_take_turns_and_have_a_place(start):
    call = read_call({"prompt": "a"}, chat=False)

    async def run(made, ends):
        await until(lambda: made.state == "ready")
        made.state = "silent"  # nothing starts

        async def submit(client):
            made.state = "ready"
            made._running[0] = SimpleNamespace(number=0, ids=[], left=None, timers=[], tokens=0)
            return (await made.submit([call], client))[0]

        greedy = [await submit("a") for _ in range(2)]
        with pytest.raises(ApiError) as caught:
            await submit("a")
        assert caught.value.status == 429
        other = await submit("b")
        assert made._waiting == [greedy[0], other, greedy[1]]
        made._running.clear()

    start(run, bad_engines.reads_nothing, waiting=2, seconds=0.0)


@pytest.mark.parametrize(("parallel", "first", "after"), [(1, "0", "1"), (2, "04", "1"), (4, "0124", "3")])
def test_one_place_is_for_short_prompts(start, parallel, first, after):
    call, sizes, started = read_call({"prompt": "a"}, chat=False), [50_000] * 4 + [1, 1], []

    async def run(made, ends):
        await until(lambda: made.state == "ready")
        made.facts = made.facts | {"parallel": parallel}
        made._send = lambda kind, number, *rest: started.append(number)
        jobs = [made._job(call, worker.Encoded([1] * size, []), "a", time.perf_counter()) for size in sizes]
        made._next()
        assert started == [jobs[int(n)].number for n in first]
        made._running.pop(started[0])  # a long one
        made._next()
        assert started[len(first) :] == [jobs[int(n)].number for n in after]
        made._fail_all(ApiError(503, "over"), "over")

    start(run, bad_engines.reads_nothing, seconds=0.0)


def test_lack_of_memory_is_found_in_causes():
    try:
        try:
            raise ImportError("libx.so: failed to map segment from shared object")
        except ImportError:
            raise ImportError("reinstall it") from None
    except ImportError as error:
        assert is_scarcity(error)
    assert is_scarcity(MemoryError()) and not is_scarcity(ValueError("x")) and not is_scarcity(json.dumps("fine"))

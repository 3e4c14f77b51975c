"""Processes of a job that follow the first process: the requests that they receive, and commands with --distributed."""

import json
import re
import signal
import threading
import types

import numpy as np
import pytest

import laneformer.infer.__main__
import laneformer.infer.engine.following
from laneformer.custom_calls import NativeError
from laneformer.errors import InputError
from laneformer.infer.engine.backend import Request
from laneformer.infer.engine.constraint import Elsewhere, as_flags
from laneformer.infer.engine.engine import Engine
from laneformer.infer.engine.following import Leader, follow
from laneformer.infer.sampling import Sampling
from laneformer.infer.text.grammar import Grammar
from laneformer.processes import GroupError
from tests.support import several
from tests.support.checkpoints import CHATML, CONTEXT, save_checkpoint
from tests.support.evaluation_cases import ADD, TWICE, write_jsonl
from tests.support.serve_cases import BACKEND, Server


class Recorder:
    """A backend that records its requests. It fails for a request with a limit of 13."""

    source = types.SimpleNamespace(mesh=several.MESH, config=types.SimpleNamespace(vocab_size=40))

    def __init__(self):
        self.asked = []

    def start(self, request):
        self.asked.append(request)
        yield 1
        if request.limit == 13:
            raise NativeError("a lane timed out")


@pytest.fixture
def pair(monkeypatch):
    """The leader, the list of requests that the follower has received, and the follower's thread."""
    backend, first = Recorder(), []
    several.in_each(monkeypatch, lambda: first.append(Leader(backend)) if not first else None)
    monkeypatch.setattr(several.processes, "_groups", iter([0]))
    thread = threading.Thread(target=follow, args=(backend,), daemon=True)
    thread.start()
    yield first[0], backend.asked, thread


def request(**fields):
    return Request(
        **{"prompt": np.array([3, 1], np.int32), "limit": 5, "sampling": Sampling(), "stop_tokens": ()} | fields
    )


def same(a: Request, b: Request) -> bool:
    fields = ("limit", "sampling", "stop_tokens", "tokens_per_dispatch", "top_logprobs")
    prompts = a.prompt.dtype == b.prompt.dtype and a.prompt.tolist() == b.prompt.tolist()
    return prompts and all(getattr(a, name) == getattr(b, name) for name in fields) and b.constraint is None


def test_announced_requests_arrive_unchanged(pair):
    leader, asked, thread = pair
    drawn = Sampling(temperature=0.7, top_k=5, top_p=0.9, min_p=0.01, repetition_penalty=1.1, seed=2**64 - 1)
    given = [
        request(),
        request(limit=13),
        request(sampling=drawn, stop_tokens=(0, 7), tokens_per_dispatch=4, top_logprobs=3),
        request(prompt=np.arange(2000, dtype=np.int32)),
    ]
    for one in given:
        leader.announce(one)
    leader.end()
    thread.join(10)
    assert not thread.is_alive() and len(asked) == len(given), "also after a failed request"
    assert all(same(a, b) for a, b in zip(given, asked, strict=True))


class Unanswerable(Elsewhere):
    def mask(self):
        raise InputError("no token may follow")


def test_only_the_first_process_computes_masks(pair):
    leader, asked, thread = pair
    with pytest.raises(InputError, match="no token may follow"):
        leader.announce(request(constraint=Unanswerable(40)))
    leader.announce(request(constraint=Elsewhere(40)))
    leader.end()
    thread.join(10)
    [followed] = asked
    assert as_flags(followed.constraint.mask(), 40).tolist() == [True] * 40 == [True] * len(followed.constraint)


def test_lost_follower_is_an_error(monkeypatch):
    monkeypatch.setattr(laneformer.infer.engine.following, "SECONDS", 0.05)
    leader, _ = several.in_each(monkeypatch, lambda: Leader(Recorder()))
    with pytest.raises(GroupError, match=r"process 1 did not follow the first one within 0\.05 s"):
        leader.announce(request())
    with pytest.raises(GroupError, match="failed to follow the first one together before"):
        leader.announce(request())


def test_leading_alone_has_no_effect(tmp_path):
    engine = Engine.load(save_checkpoint(tmp_path / "model", *CHATML), BACKEND)
    with engine.leading():
        unfinished = engine.generate([1, 2], max_new_tokens=300)
        next(unfinished)
    assert unfinished.result.finish_reason == "cancelled"
    engine.follow()


def test_distributed_humaneval_needs_a_checkpoint(tmp_path, capsys):
    assert (
        laneformer.infer.__main__.main(["humaneval", "--data", "x.jsonl", "--samples", "y.jsonl", "--distributed"]) == 2
    )
    assert "--distributed needs --checkpoint" in capsys.readouterr().err


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", *CHATML, layers=1, lanes=2)


JOB = ("--backend", "xla", "--devices", 2, "--distributed")


@pytest.mark.slow
def test_two_processes_serve_the_texts_of_one(checkpoint):
    """Two processes give the texts of one, also after clients have disconnected. Both end with the server."""
    pytest.importorskip("llguidance")
    engine, form = Engine.load(checkpoint, "xla", devices=2), "[a-f]{3}(x|yz)"
    expected = engine.generate([3, 1, 4], max_new_tokens=20, stop_tokens=()).result.text
    drawn = Sampling(temperature=1.0, seed=5)
    formed = engine.generate([3, 1, 4], max_new_tokens=20, sampling=drawn, constraint=Grammar.regex(form)).result.text
    assert re.fullmatch(form, formed)
    first, second = several.environments(2)
    follower = several.start(second, "-m", "infer", "serve", "--checkpoint", checkpoint, *JOB)
    server = Server(checkpoint, *JOB, environment=first)
    try:
        server.wait_until(200)
        for _ in range(2):
            with server.stream(prompt=[3], max_tokens=CONTEXT, ignore_eos=True) as stream:
                next(stream)
            with server.stream(prompt=[3], max_tokens=CONTEXT, regex="[a-z]*1") as stream:
                next(stream)
            server.wait_for_metric("num_requests_running", 0)
            fields = {"max_tokens": 20, "seed": 5}
            assert server.complete([3, 1, 4], **fields, regex=form)["choices"][0]["text"] == formed
            assert server.complete([3, 1, 4], max_tokens=2, regex=form)["choices"][0]["finish_reason"] == "length"
            assert (
                server.complete([3, 1, 4], max_tokens=20, temperature=0, ignore_eos=True)["choices"][0]["text"]
                == expected
            )
        code, err, _ = server.end(signal.SIGTERM)
        follower.wait(30)
        output = follower.stdout.read()
    finally:
        server.kill()
        follower.kill()
        follower.communicate()
    assert (code, follower.returncode) == (0, 0), err + output
    assert err.splitlines()[-1] == "stopped" and "Traceback" not in err + output and "http" not in output


@pytest.mark.exhaustive
def test_two_processes_write_the_samples_of_one(checkpoint, tmp_path):
    """Two processes write the same samples and files as one."""
    write_jsonl(tmp_path / "he.jsonl", [{**(ADD if n % 2 else TWICE), "task_id": f"HumanEval/{n}"} for n in range(3)])
    command = (
        "-m",
        "infer",
        "humaneval",
        "--checkpoint",
        checkpoint,
        "--data",
        tmp_path / "he.jsonl",
        "--max-new-tokens",
        12,
        "--generate-only",
        "--backend",
        "xla",
        "--devices",
        2,
        "--samples",
    )
    together = [
        several.start(environment, *command, tmp_path / f"{index}.jsonl", "--distributed")
        for index, environment in enumerate(several.environments(2))
    ]
    output = [process.communicate(timeout=200)[0] for process in together]
    assert [process.returncode for process in together] == [0, 0], output
    assert (
        f"{tmp_path / '0.jsonl'}: 3 samples" in output[0]
        and "samples" not in output[1]
        and not (tmp_path / "1.jsonl").exists()
    )
    alone = several.start(several.environments(1)[0], *command, tmp_path / "alone.jsonl")
    assert "3 samples" in alone.communicate(timeout=200)[0]
    texts = [
        [json.loads(line)["raw"] for line in (tmp_path / f"{name}.jsonl").read_text().splitlines()]
        for name in ("0", "alone")
    ]
    assert texts[0] == texts[1] and any(texts[0])

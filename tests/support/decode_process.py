"""One process of a job that decodes on several emulated GPUs, one per process. tests/custom_calls/gpu/test_processes.py
runs it with its index and a folder.

All processes make the same calls of the session and of the engine. Each writes its results into files of the folder.
"""

import contextlib
import functools
import io
import json
import os
import signal
import sys
import threading
import time
from pathlib import Path

import jax
import numpy as np

import laneformer
from laneformer import infer
from laneformer.infer.__main__ import main as command
from laneformer.infer.engine.gpu import CudaBackend
from tests.support import emulated, small
from tests.support.gpu_cases import jitted

PROCESSES, ROOM = 2, 16
LAUNCHES = ("persistent", "graph")
MACHINE = emulated.Machine(warp_size=32, ctas=4, warps=2, shared_bytes=232_448, bulk_copies=True)  # one of two devices
TIMEOUT_MS = 2000  # in the call during which the other process is killed
DRAWN = {"temperature": 1.0, "top_p": 0.9, "penalty": 1.2}


def tiny():
    config = small.make_config(lanes=4, layout="dtp(1)", num_hidden_layers=2)
    return config, small.make_weights(config)


def with_lanes_own() -> laneformer.Laneformer:
    """A model whose norms, biases and head belong to lanes."""
    config = small.make_config(
        lanes=4, layout="dtp(1)", num_hidden_layers=2, qkv_bias=True, replicated_rmsn_scale=False, lm_head_type="lane"
    )
    return laneformer.Laneformer(
        config, {path: jax.device_put(weight) for path, weight in small.make_weights(config).items()}
    )


def answers(session, config, mesh) -> list:
    """Outputs of three calls: one greedy, and two that draw with the same settings and seed."""
    call, results = jitted(session, mesh, room=ROOM, top=3, logits=True), []
    for settings in ({}, DRAWN, DRAWN):
        inputs, state = (
            small.make_inputs(small.prompt_of(config, 5), 6, **settings),
            small.make_state(config, 64, mesh=mesh),
        )
        results.append(jax.block_until_ready(call(inputs, state)[0]))
    return [np.asarray(x.addressable_data(0)) for outputs in results for x in outputs]


def running(session, config, mesh, limit):
    """Starts a long call on a thread. Returns the thread, and a list to which the call's status is appended once it has
    ended.
    """
    call, status = jitted(session, mesh, room=512), []
    inputs, state = small.make_inputs([3], limit, room=512), small.make_state(config, 512, mesh=mesh)
    session.begin()
    thread = threading.Thread(
        target=lambda: status.append(np.asarray(call(inputs, state)[0].status.addressable_data(0)).tolist())
    )
    thread.start()
    return thread, status


def wait_for(session, count: int) -> None:
    """Waits until the session has emitted `count` tokens, at most about a minute."""
    deadline = time.monotonic() + 60
    while session.wait(count - 1) < count:
        assert time.monotonic() < deadline


def cancelled_by(index: int, session, config, mesh) -> list:
    """Status of a call that process `index` cancels, whether the call has finished, and its emitted tokens."""
    thread, status = running(session, config, mesh, 500)
    if jax.process_index() == index:
        wait_for(session, 3)
        session.cancel()
    thread.join()
    return [status[0], session.finished, session.drawn(0, status[0][0]).tokens.tolist()]


def use_emulated_devices() -> None:
    """Makes backend cuda use emulated devices, which JAX does not know."""
    CudaBackend.unavailable = classmethod(lambda cls, source: None)
    CudaBackend.__init__ = functools.partialmethod(
        CudaBackend.__init__, machine=MACHINE, compile_with=emulated.compile_with(MACHINE), driver=emulated.driver()
    )


def output_of(*arguments) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command that all processes run."""
    with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as err:
        status = command([*map(str, arguments), "--backend", "cuda", "--devices", str(PROCESSES), "--distributed"])
    return status, out.getvalue(), err.getvalue()


def generations(engine) -> list:
    """Tokens of two generations, the first with a prompt long enough for XLA, and the finish reason of a generation
    between them that process 1 alone cancels.
    """
    prompt = small.prompt_of(engine.config, 100)
    tokens = [list(engine.generate(prompt, max_new_tokens=6))]
    generation = engine.generate([1], max_new_tokens=400)
    if jax.process_index() == 1:
        next(generation)
        generation.cancel()
    reason = generation.result.finish_reason
    tokens.append(list(engine.generate([1], max_new_tokens=6)))
    return [tokens, reason]


def led(engine) -> list | None:
    """Results of the process that leads, in the other processes None: a complete answer, the finish reason of an answer
    that it abandons, and another complete answer.
    """
    if jax.process_index() > 0:
        return engine.follow()
    with engine.leading():
        answers = [list(engine.generate([1], max_new_tokens=6))]
        with engine.generate([1], max_new_tokens=400) as left:
            next(left)
        answers += [
            left.result.finish_reason,
            list(engine.generate(small.prompt_of(engine.config, 100), max_new_tokens=6)),
        ]
    return answers


def main(index: int, folder: Path) -> None:
    use_emulated_devices()
    model, few = (
        ("--checkpoint", folder / "model"),
        ("--context", 5, "--output-tokens", 6, "--runs", 1, "--warmup-runs", 0),
    )
    files = ("--json", folder / f"record{index}.json", "--trace", folder / f"trace{index}.json")
    generate = output_of("generate", *model, "--prompt-ids", "3,1,4", "--max-new-tokens", 6, "--ignore-eos")
    (folder / f"commands{index}.json").write_text(json.dumps([generate, output_of("bench", *model, *few, *files)]))

    config, weights = tiny()
    mesh = laneformer.make_mesh(4, lane=PROCESSES)
    session = emulated.make_session(config, weights, mesh=mesh, machine=MACHINE, chaos_us=20)
    np.savez(folder / f"persistent{index}.npz", *answers(session, config, mesh))
    graph = emulated.make_session(config, weights, mesh=mesh, machine=MACHINE, launch="graph")
    np.savez(folder / f"graph{index}.npz", *answers(graph, config, mesh))
    results = {f"cancelled by {by}": cancelled_by(by, session, config, mesh) for by in range(PROCESSES)}
    engine = infer.Engine.load(folder / "model", "cuda", devices=PROCESSES)
    results["engine"], results["led"] = generations(engine), led(engine)
    before = emulated.allocations()
    session.close()
    results["freed"] = before - emulated.allocations()

    session = emulated.make_session(config, weights, mesh=mesh, machine=MACHINE, timeout_ms=TIMEOUT_MS)
    thread, status = running(session, config, mesh, 500)
    if index == 1:
        wait_for(session, 3)
        os.kill(os.getpid(), signal.SIGKILL)
    thread.join()
    results["left alone"] = [status[0], session.failure]
    (folder / f"results{index}.json").write_text(json.dumps(results))
    os._exit(0)  # a normal exit would wait for the killed process


if __name__ == "__main__":
    main(int(sys.argv[1]), Path(sys.argv[2]))

"""`python playground_engine.py serve ...`: the server with an engine that needs no model. It repeats its prompt, one
token every 1/3000 s.

The prompt "crash" ends the engine process. A prompt that begins with "silent" has its first token after 30 s. Of a
prompt that begins with "again", all but 5 tokens are cached; tokens 10 to 19 of each 20 were drafts, and another
request shares the passes of tokens 100 to 199. --checkpoint no-chat has no chat template. With a path as --checkpoint,
the engine is loaded once the file exists.
"""

import itertools
import os
import re
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import numpy as np

from laneformer.infer.__main__ import main
from laneformer.infer.serve import worker as serve_worker

RATE = 3000.0
PREFILL = 0.005  # seconds
CONTEXT = 100_000


def pieces(prompt):
    """Endless tokens of an answer: the prompt again and again, in words and blanks of at most four characters."""
    return itertools.cycle(re.findall(r"\w{1,4}|\s{1,4}|\S", prompt))


# Drafting figures of an answer to a prompt that begins with "again".
DRAFTING = {"passes": 20, "tokens_per_pass": 1.45, "drafts": 5, "drafted": 12, "rows": (15, 2, 1, 2)}
DRAFTING |= {"accepted": (5, 3, 1), "predicted": 0, "predicted_accepted": 0}


def answer(prompt, tokens):
    return "".join(itertools.islice(pieces(prompt), tokens))


class Echo(Iterator):
    """A generation, with the interface of infer.Generation."""

    def __init__(self, prompt, tokens):
        self.began, self.tokens, self.texts, self.times, self.cancelled = time.perf_counter(), tokens, [], [], False
        self.pieces = pieces(prompt)
        self.cached = len(prompt.encode()) - 5 if prompt.startswith("again") else 0
        self.shared = 3 if self.cached else 0
        self.again = prompt.startswith("again")
        self.prefill = 30.0 if prompt.startswith("silent") else PREFILL

    def cancel(self):
        self.cancelled = True

    def __next__(self):
        from laneformer.infer.engine.generation import Token  # imports JAX, which the web process does not need

        given = len(self.times)
        if self.cancelled or given == self.tokens:
            raise StopIteration
        while (wait := self.began + self.prefill + given / RATE - time.perf_counter()) > 0 and not self.cancelled:
            time.sleep(min(wait, 0.05))
        if self.cancelled:
            raise StopIteration
        self.texts.append(next(self.pieces))
        self.times.append(time.perf_counter() - self.began)
        drafted, others = self.again and given % 20 >= 10, int(self.again and 100 <= given < 200)
        return Token(0, self.texts[-1], time=self.times[-1], drafted=drafted, others=others)

    @property
    def result(self):
        n, first, last = len(self.times), self.times[0] if self.times else None, self.times[-1] if self.times else 0.0
        return SimpleNamespace(
            finish_reason="cancelled" if self.cancelled else "length",
            stop_reason=None,
            text="".join(self.texts),
            tokens=self.texts,
            cached_tokens=self.cached,
            shared_passes=self.shared,
            time_to_first_token=first,
            prefill_time=PREFILL,
            time_per_token=(last - first) / (n - 1) if n > 1 else None,
            total_time=last,
            drafting=SimpleNamespace(**DRAFTING) if self.cached else None,
        )


class Engine:
    config = SimpleNamespace(vocab_size=256, max_position_embeddings=CONTEXT, eos_token_id=())
    tokenizer = SimpleNamespace(encode=lambda text: list(text.encode()))
    parallel = 1

    def check_sampling(self, sampling):
        pass

    def encode(self, ids):
        return np.array(ids)  # int64: the server makes int32 of it

    def generate(self, ids, max_new_tokens, **_):
        prompt = bytes([*ids]).decode()
        if prompt == "crash":
            os._exit(3)
        return Echo(prompt, max_new_tokens)


class Chat:
    """A chat template whose prompt is the last message."""

    tool_format, has_developer = None, False

    def ends(self, eos):
        return eos

    def channels(self, prompt, calls):
        return None

    def encode(self, messages, **_):
        return list(messages[-1]["content"].encode())


def worker(connection, model):
    """Replaces serve_worker.main."""
    checkpoint = model.engine.checkpoint
    chat, file = None if checkpoint == "no-chat" else Chat(), Path(checkpoint)
    while file.is_absolute() and not file.exists():
        time.sleep(0.01)
    conditions = {
        "model": "echo",
        "parameters": 2_000_000_000,
        "layout": "laneformer",
        "lanes": 8,
        "stored_dtype": "bfloat16",
        "backend": "none",
        "weights_dtype": "bfloat16",
        "compute_dtype": "bfloat16",
        "kv_dtype": "bfloat16",
        "prefix_cache": 0,
        "device": "no device",
        "devices": 8,
        "batch_size": 1,
        "context": CONTEXT,
        "random_weights": False,
        "on_cpu": False,
        "simulated": True,
    }
    connection.send(
        (
            "ready",
            {
                "name": "echo",
                "conditions": conditions,
                "parallel": 1,
                "chat": chat is not None,
                "tool_format": None,
                "template_variables": ["messages"],
                "fingerprint": "fp",
                "seconds": 0.0,
            },
        )
    )
    made = serve_worker._Worker(connection, Engine(), chat, "it has no template", {}, drafts=True)
    made.start()
    made.run()


if __name__ == "__main__":
    serve_worker.main = worker
    sys.exit(main())

"""llama.cpp with several sequences in a batch, drafts from n-grams and kept prefixes, as its server uses them, through
its C interface. The times do not include the server's HTTP and sampling.
"""

import json
import time
from pathlib import Path

import llama_cpp
import numpy as np
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from laneformer.commands.lab.peers.llama_cpp import BATCH, LlamaCpp
from laneformer.commands.lab.peers.protocol import Served, Task, serve


class LlamaCppServing(LlamaCpp):
    def __init__(self, task: Task):
        super().__init__(task)
        self._batch, self._texts = llama_cpp.llama_batch_init(BATCH, 0, 1), 0

    def together(self, prompt: int, tokens: int, clients: int) -> Served:
        prompts = [self._ids(prompt) for _ in range(clients)]
        self._forget(clients)
        start, passes = time.perf_counter(), 0
        for first in range(0, prompt, BATCH // clients):
            last = min(first + BATCH // clients, prompt)
            rows = [(ids[p], p, s, p == prompt - 1) for s, ids in enumerate(prompts) for p in range(first, last)]
            drawn = self._pass(rows)
        for position in range(prompt, prompt + tokens - 1):
            drawn = self._pass([(token, position, s, True) for s, token in enumerate(drawn)])
            passes += 1
        return Served(time.perf_counter() - start, clients * tokens, passes)

    def copied(self, file: str, drafts: int) -> Served:
        text = json.loads(Path(file).read_text(encoding="utf-8"))
        answer, whole = text["answer"], np.array(text["prompt"] + text["answer"], np.intc)
        propose = LlamaPromptLookupDecoding(num_pred_tokens=drafts) if drafts > 0 else None
        self._forget(1)
        self._read(text["prompt"], 0)
        filled = len(text["prompt"])  # positions in the cache; the next token is known already
        start, passes = time.perf_counter(), 0
        while filled < len(whole) - 1:
            found = propose(whole[: filled + 1]).tolist() if propose else []
            found = found[: len(whole) - 2 - filled]  # the last token that is drawn needs no more drafts
            ids = [int(whole[filled]), *found]
            self._pass([(token, filled + i, 0, True) for i, token in enumerate(ids)])
            right = 0
            while right < len(found) and found[right] == whole[filled + 1 + right]:
                right += 1
            filled += 1 + right
            passes += 1
            llama_cpp.llama_memory_seq_rm(self._memory, 0, filled, -1)
        return Served(time.perf_counter() - start, len(answer) - 1, passes)

    def turn(self, prompt: int, answer: int, new: int) -> Served:
        self._forget(1)
        token = self._read(self._ids(prompt), 0)
        for position in range(prompt, prompt + answer - 1):
            [token] = self._pass([(token, position, 0, True)])
        start = time.perf_counter()
        self._read([token, *self._ids(new)], prompt + answer - 1)
        return Served(time.perf_counter() - start, prompt + answer - 1, 1)

    def _read(self, ids: list[int], first: int) -> int:
        """Computes tokens of sequence 0 from position `first` on; returns the token after them."""
        for start in range(0, len(ids), BATCH):
            part = ids[start : start + BATCH]
            rows = [(token, first + start + i, 0, start + i == len(ids) - 1) for i, token in enumerate(part)]
            drawn = self._pass(rows)
        return drawn[0]

    def _pass(self, rows: list[tuple[int, int, int, bool]]) -> list[int]:
        """Computes a batch; returns the drawn tokens. rows: (token, position, sequence, whether the next is drawn)."""
        batch = self._batch
        batch.n_tokens = len(rows)
        for i, (token, position, sequence, draws) in enumerate(rows):
            batch.token[i], batch.pos[i], batch.logits[i] = token, position, draws
            batch.n_seq_id[i], batch.seq_id[i][0] = 1, sequence
        if status := llama_cpp.llama_decode(self._context, batch):
            raise SystemExit(f"llama_decode: status {status}")
        logits = [llama_cpp.llama_get_logits_ith(self._context, i) for i, row in enumerate(rows) if row[3]]
        return [int(np.ctypeslib.as_array(row, (self._vocab,)).argmax()) for row in logits]

    def _forget(self, sequences: int) -> None:
        self._absorbed = 0
        for sequence in range(sequences):
            llama_cpp.llama_memory_seq_rm(self._memory, sequence, 0, -1)

    def _ids(self, count: int) -> list[int]:
        self._texts += 1  # other ids each time
        return np.random.default_rng(self._texts).integers(0, self._vocab, count).tolist()


if __name__ == "__main__":
    serve(LlamaCppServing)

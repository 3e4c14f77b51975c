"""Our engine with several requests at a time, drafts and kept prefixes, as `infer serve` runs it, without HTTP."""

import json
import threading
import time
from pathlib import Path

import numpy as np

from laneformer.commands.lab.peers.ours import Ours
from laneformer.commands.lab.peers.protocol import Served, serve
from laneformer.infer.engine.backend import Request
from laneformer.infer.sampling import Sampling


class OursServing(Ours):
    def together(self, prompt: int, tokens: int, clients: int) -> Served:
        asked = [self._request(self._ids(prompt), tokens, cache_prompt=False, draft_max=0) for _ in range(clients)]
        errors: list[BaseException] = []

        def run(request: Request) -> None:
            try:
                for _ in self._backend.start(request):
                    pass
            except BaseException as error:  # the main thread raises it
                errors.append(error)

        threads = [threading.Thread(target=run, args=(request,)) for request in asked]
        start = time.perf_counter()
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        seconds = time.perf_counter() - start
        if errors:
            raise errors[0]
        return Served(seconds, clients * tokens, 0)

    def copied(self, file: str, drafts: int) -> Served:
        text = json.loads(Path(file).read_text(encoding="utf-8"))
        prompt, answer = np.array(text["prompt"], np.int32), tuple(text["answer"])
        most = None if drafts < 0 else drafts
        request = self._request(prompt, len(answer), cache_prompt=False, draft_max=most, forced=answer)
        chunks, drawn = self._backend.start(request), []
        next(chunks)
        start = time.perf_counter()
        for chunk in chunks:
            drawn += chunk.tokens
        seconds = time.perf_counter() - start
        if drawn != list(answer[1:]):
            raise RuntimeError(f"{file}: the answer was not forced")
        return Served(seconds, len(drawn), chunks.drafting.passes)

    def turn(self, prompt: int, answer: int, new: int) -> Served:
        first = self._ids(prompt)
        drawn = [
            token for chunk in self._backend.start(self._request(first, answer, draft_max=0)) for token in chunk.tokens
        ]
        second = np.concatenate([first, np.array(drawn, np.int32), self._ids(new)])
        start = time.perf_counter()
        chunk = next(self._backend.start(self._request(second, 1)))
        return Served(time.perf_counter() - start, chunk.cached, 1)

    def _ids(self, count: int) -> np.ndarray:
        self._prompts += 1  # other ids each time
        return np.random.default_rng(self._prompts).integers(0, self._vocab, count, np.int32)

    def _request(self, ids: np.ndarray, limit: int, **options) -> Request:
        return Request(ids, limit, Sampling(), stop_tokens=(), **options)


if __name__ == "__main__":
    serve(OursServing)

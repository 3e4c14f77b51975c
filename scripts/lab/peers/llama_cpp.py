"""llama.cpp through its C interface: bfloat16 or quantized weights in memory, not mapped from the file, and a float16
cache.
"""

import ctypes
import os
import time

import llama_cpp
import numpy as np

from laneformer.commands.lab.peers import gguf_model
from laneformer.commands.lab.peers.protocol import Task, serve

BATCH = 512  # tokens of a prompt per batch


class LlamaCpp:
    def __init__(self, task: Task):
        path, config, tensors = gguf_model.model_file(task)
        llama_cpp.llama_backend_init()
        of_model = llama_cpp.llama_model_default_params()
        of_model.n_gpu_layers, of_model.load_mode = 0, llama_cpp.LLAMA_LOAD_MODE_NONE
        self._model = llama_cpp.llama_model_load_from_file(os.fsencode(path), of_model)
        of_context = llama_cpp.llama_context_default_params()
        of_context.n_ctx, of_context.n_batch = task.slots * max(task.positions, task.longest_prompt), BATCH
        of_context.n_seq_max, of_context.kv_unified = task.slots, False  # llama.cpp's advice for separate sequences
        of_context.n_threads = of_context.n_threads_batch = task.threads
        self._context = self._model and llama_cpp.llama_init_from_model(self._model, of_context)
        if not self._context:
            raise SystemExit(f"llama.cpp could not load {path}")
        self._memory = llama_cpp.llama_get_memory(self._context)
        self._vocab, self._absorbed, self._kept = config.vocab_size, 0, None
        self.conditions = {
            "versions": {"llama-cpp-python": llama_cpp.__version__},
            "weights": "bfloat16",
            **gguf_model.facts(config, tensors),
            "compute": f"as llama.cpp chooses for {gguf_model.type_of(task.weights).name}",
            "activations": gguf_model.activations(tensors),
            "kv": "float16",
            "threads": task.threads,
            "load": "not mapped (load mode none)",
            "system": llama_cpp.llama_print_system_info().decode().strip(),
        }

    def decode(self, prompt: int, tokens: int) -> list[float]:
        ids = np.random.default_rng(0).integers(0, self._vocab, prompt).tolist()
        if self._absorbed != prompt:
            self._absorb(ids[:-1])
            self._absorbed, self._kept = prompt, self._state()
        elif not llama_cpp.llama_memory_seq_rm(self._memory, 0, prompt - 1, -1):  # fails with recurrent layers
            llama_cpp.llama_state_seq_set_data(self._context, self._kept, len(self._kept), 0)
        times, token = [], ids[-1]
        for _ in range(tokens):
            self._compute([token])
            token = self._best()
            times.append(time.perf_counter())
        return times

    def first(self, prompt: int) -> float:
        ids = np.random.default_rng(1).integers(0, self._vocab, prompt).tolist()
        self._absorbed = 0
        start = time.perf_counter()
        self._absorb(ids)
        self._best()
        return time.perf_counter() - start

    def _absorb(self, ids: list[int]) -> None:
        """Clears the cache and computes a prompt."""
        llama_cpp.llama_memory_seq_rm(self._memory, 0, 0, -1)
        for start in range(0, len(ids), BATCH):
            self._compute(ids[start : start + BATCH])

    def _state(self) -> ctypes.Array | None:
        """A copy of the cache if the model has layers whose state cannot be cut back, else None."""
        if not llama_cpp.llama_model_is_hybrid(self._model):
            return None
        size = llama_cpp.llama_state_seq_get_size(self._context, 0)
        kept = (ctypes.c_uint8 * size)()
        llama_cpp.llama_state_seq_get_data(self._context, kept, size, 0)
        return kept

    def _best(self) -> int:
        logits = llama_cpp.llama_get_logits_ith(self._context, -1)
        return int(np.ctypeslib.as_array(logits, (self._vocab,)).argmax())

    def _compute(self, ids: list[int]) -> None:
        array = (llama_cpp.llama_token * len(ids))(*ids)
        if status := llama_cpp.llama_decode(self._context, llama_cpp.llama_batch_get_one(array, len(ids))):
            raise SystemExit(f"llama_decode: status {status}")


if __name__ == "__main__":
    serve(LlamaCpp)

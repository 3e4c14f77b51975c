"""OpenVINO: a bfloat16 Llama converted by optimum-intel with its cache as state; OpenVINO chooses the compute dtype.

It chooses bfloat16 on processors that multiply it natively. Elsewhere, bfloat16 takes eight times as long as float32.
"""

import shutil
import time
from pathlib import Path

import numpy as np
import openvino

from laneformer.commands.lab.peers.protocol import LONGEST, Shape, Task, serve

MODEL = "openvino_model.xml"
DTYPES = {"bf16": "bfloat16", "f16": "float16", "f32": "float32", "u8": "uint8"}


def convert(folder: Path, s: Shape) -> None:
    """Writes the model with random weights, different in every layer, since OpenVINO stores equal constants once."""
    import torch
    from optimum.exporters.openvino import export_from_model
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    model = (
        LlamaForCausalLM(
            LlamaConfig(
                vocab_size=s.vocab,
                hidden_size=s.hidden,
                intermediate_size=s.ff,
                num_hidden_layers=s.layers,
                num_attention_heads=s.heads,
                num_key_value_heads=s.kv_heads,
                head_dim=s.head_dim,
                max_position_embeddings=LONGEST,
                rms_norm_eps=s.norm_eps,
                rope_theta=s.rope_theta,
                tie_word_embeddings=s.tied,
                dtype="bfloat16",
            )
        )
        .to(torch.bfloat16)
        .eval()
    )
    export_from_model(model, folder, task="text-generation-with-past", stateful=True, patch_16bit_model=True)


class OpenVino:
    def __init__(self, task: Task):
        folder = Path(task.folder) / f"{task.shape.name}-openvino"
        if not folder.exists():
            part = folder.with_name(f"{folder.name}.part")
            shutil.rmtree(part, ignore_errors=True)
            convert(part, task.shape)
            part.rename(folder)
        core = openvino.Core()
        compiled = core.compile_model(
            folder / MODEL,
            "CPU",
            {"INFERENCE_NUM_THREADS": task.threads, "KV_CACHE_PRECISION": "bf16", "PERFORMANCE_HINT": "LATENCY"},
        )
        self._request = compiled.create_infer_request()
        self._kept: dict[int, list[np.ndarray]] = {}
        self._vocab = task.shape.vocab
        compute, kv = (
            DTYPES[compiled.get_property(name).to_string()]
            for name in ("INFERENCE_PRECISION_HINT", "KV_CACHE_PRECISION")
        )
        self.conditions = {
            "versions": {"openvino": openvino.__version__},
            "weights": "bfloat16",
            "compute": compute,
            "kv": kv,
            "threads": compiled.get_property("INFERENCE_NUM_THREADS"),
            "load": "optimum-intel, stateful, cache filled by repeating a token",
            "system": ", ".join(core.get_property("CPU", "OPTIMIZATION_CAPABILITIES")),
        }

    def decode(self, prompt: int, tokens: int) -> list[float]:
        before = max(1, prompt - 1)
        if before not in self._kept:
            self._request.reset_state()
            self._compute(np.array([1]), 0)
            # The cache of one token, repeated: a real prompt takes minutes where bfloat16 is emulated.
            self._kept = {
                before: [np.repeat(state.state.data, before, axis=2) for state in self._request.query_state()]
            }
        for state, kept in zip(self._request.query_state(), self._kept[before], strict=True):
            state.state = openvino.Tensor(kept)
        times, token = [], 1
        for position in range(before, before + tokens):
            token = self._compute(np.array([token]), position)
            times.append(time.perf_counter())
        return times

    def first(self, prompt: int) -> float:
        ids = np.random.default_rng(1).integers(0, self._vocab, prompt)
        self._request.reset_state()
        start = time.perf_counter()
        self._compute(ids, 0)
        return time.perf_counter() - start

    def _compute(self, tokens: np.ndarray, position: int) -> int:
        """Computes the token after `tokens`, int64 [n], which start at `position`."""
        positions = np.arange(position, position + len(tokens))[None]
        self._request.infer(
            {
                "input_ids": tokens[None],
                "attention_mask": np.ones((1, position + len(tokens)), np.int64),
                "position_ids": positions,
                "beam_idx": np.zeros(1, np.int32),
            }
        )
        return int(self._request.get_output_tensor(0).data[0, -1].argmax())


if __name__ == "__main__":
    serve(OpenVino)

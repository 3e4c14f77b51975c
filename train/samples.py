"""Text samples during training, with the same prompts and noise each time, so that only the weights differ."""

from collections.abc import Sequence
from pathlib import Path

import jax
import numpy as np
from flax import nnx
from jax.sharding import Mesh

from laneformer.config import ModelConfig
from laneformer.errors import CheckpointError, InputError
from laneformer.infer.engine.engine import Engine
from laneformer.infer.sampling import Sampling
from laneformer.infer.text.tokenizer import Tokenizer
from laneformer.model import Laneformer, check_ids
from laneformer.precision import Precision

SAMPLING = Sampling(temperature=0.8, top_p=0.95)


def read_tokenizer(file: Path, config: ModelConfig) -> Tokenizer | None:
    """The tokenizer of a model in a tokenizer.json; None if it is not readable."""
    try:
        return Tokenizer(file, config.bos_token_id)
    except CheckpointError:
        return None


class LiveEngine:
    """An engine that uses the weights in training in place, on the training mesh. It compiles once, at its first
    request.
    """

    def __init__(self, config: ModelConfig, mesh: Mesh, precision: Precision, tokenizer: Path):
        """tokenizer: a tokenizer.json; if it is not readable, the engine takes and returns token ids."""
        self.config, self.mesh, self.precision = config, mesh, precision
        self.tokenizer = read_tokenizer(tokenizer, config)
        self._engine: Engine | None = None

    def holding(self, params: dict[str, jax.Array]) -> Engine:
        """The engine with the weights `params`: path -> weight, on the mesh."""
        jax.block_until_ready(params)  # on host devices, programs with collectives must not queue up
        model = Laneformer(self.config, params, self.precision, self.mesh)
        if self._engine is None:
            self._engine = Engine(model, "xla", tokenizer=self.tokenizer)
        else:  # a new engine would compile again
            nnx.update(self._engine.model, nnx.state(model))
        return self._engine


class Samples:
    """Continues prompts with weights that are being trained."""

    def __init__(self, live: LiveEngine, prompts: Sequence[str], *, max_new_tokens: int, sampling: Sampling = SAMPLING):
        """prompts: texts, or without a tokenizer token ids such as "3,1,4"; samples then have no text.

        The empty prompt starts a document: it is the begin-of-text token, or in a model without one the end-of-text
        token, which ends the previous document. Raises InputError for a prompt that does not fit the model.
        """
        self.live, self.config, self.tokenizer = live, live.config, live.tokenizer
        self.max_new_tokens, self.sampling = max_new_tokens, sampling
        self.prompts = {prompt: self._encode(prompt) for prompt in prompts}

    def draw(self, params: dict[str, jax.Array]) -> list[dict]:
        """One record per prompt: {"sample": i, "prompt", "text" (with a tokenizer), "tokens", "finish_reason"}.

        params: path -> weight, on the mesh.
        """
        engine, records = self.live.holding(params), []
        for i, (prompt, ids) in enumerate(self.prompts.items()):
            result = engine.generate(
                ids,
                max_new_tokens=self.max_new_tokens,
                sampling=self.sampling,
                tokens_per_dispatch=self.max_new_tokens,  # fixed, because all hosts must run the same programs
            ).result
            text = {} if self.tokenizer is None else {"text": result.text}
            records.append(
                {
                    "sample": i,
                    "prompt": prompt,
                    **text,
                    "tokens": list(result.tokens),
                    "finish_reason": result.finish_reason,
                }
            )
        return records

    def _encode(self, prompt: str) -> np.ndarray:
        """Token ids, int32 [n], n >= 1."""
        starts = [*([] if self.config.bos_token_id is None else [self.config.bos_token_id]), *self.config.eos_token_id]
        if self.tokenizer is not None:
            ids = self.tokenizer.encode(prompt) or starts[:1]
        elif prompt:
            try:
                ids = [int(word) for word in prompt.split(",")]
            except ValueError:
                raise InputError(
                    f"watch.prompts: {prompt!r} is not a list of token ids, and the data has no tokenizer.json; write"
                    " ids such as 3,1,4"
                ) from None
        else:
            ids = starts[:1]
        if not ids:
            raise InputError(
                "watch.prompts: the empty prompt needs a model with bos_token_id or eos_token_id; choose another prompt"
            )
        context = self.config.max_position_embeddings
        if len(ids) >= context:
            raise InputError(
                f"watch.prompts: {prompt!r} has {len(ids)} tokens, but the context is {context}; shorten it"
            )
        check_ids(self.config, np.array([ids]))
        return np.array(ids, np.int32)


def texts(records: Sequence[dict]) -> dict[str, str]:
    """Prompt and answer of each sample by name, for a `Sink`; without text, the answer is its token ids."""
    return {
        f"samples/{r['sample']}": f"{r['prompt']}{r.get('text', ' -> ' + ','.join(map(str, r['tokens'])))}"
        for r in records
    }

"""All three phases of a language model's training in minutes on two CPU cores."""

import dataclasses
from pathlib import Path

from laneformer.recipes.models import TINY, TINY_LONG
from laneformer.recipes.stdlib import stdlib
from laneformer.train.config import DataConfig, LaterPhase, OptimizerConfig, TrainConfig


def tiny() -> TrainConfig:
    """The model of `stdlib` pretrained, extended to four times the context, and tuned to answer: every phase on a CPU.

    Needs data/stdlib from `make run`, and data/stdlib_chat from scripts/docstrings.py.
    """
    code, chat = Path("data/stdlib"), Path("data/stdlib_chat")
    config = stdlib()
    return dataclasses.replace(
        config,
        name="tiny",
        steps=300,
        model=TINY,
        optimizer=OptimizerConfig(
            kind="muon", learning_rate=4e-3, warmup_steps=30, decay_fraction=0.2, final_fraction=0.25
        ),
        then={
            "long": LaterPhase(
                steps=50,
                data=DataConfig(
                    path=(code,),
                    sequence_length=1024,
                    batch_size=2,
                    validation_batches=4,
                    attend_across_documents=False,
                ),
                optimizer=OptimizerConfig(kind="muon", learning_rate=1e-3, warmup_steps=5, schedule="cosine"),
                sliding_window=TINY_LONG.sliding_window,
                rope_scaling=TINY_LONG.rope_scaling,
            ),
            "instruct": LaterPhase(
                steps=100,
                data=DataConfig(
                    path=(chat,),
                    sequence_length=512,
                    batch_size=4,
                    packing="best_fit",
                    attend_across_documents=False,
                    validation_path=(code,),
                    validation_batches=4,
                ),
                optimizer=OptimizerConfig(learning_rate=1e-3, warmup_steps=5, schedule="cosine", weight_decay=0.0),
            ),
        },
        watch=dataclasses.replace(
            config.watch, samples_every=150, prompts=("def read_lines(path):\n", "class Stack:\n")
        ),
    )

"""Generation: engines that run a model and the sampling they share."""

from infer.engine import BACKENDS, Engine
from infer.generation import Generation, Result, Token
from infer.sampling import Sampling
from infer.tokenizer import Tokenizer

__all__ = ["BACKENDS", "Engine", "Generation", "Result", "Sampling", "Token", "Tokenizer"]

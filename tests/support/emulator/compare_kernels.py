"""Compares logits and tokens of the GPU kernel on an emulated GPU with those of the CPU kernel, for any small model.

  python -m tests.support.emulator.compare_kernels experts lanes=3 hidden_size=96 \
      moe_intermediate_size=192 --weights int4
  python -m tests.support.emulator.compare_kernels layout=ladder heads=4 head_dim=10 --launch graph --code port

The first argument may name a case of tests/support/decode_cases.py; FIELD=VALUE sets a size of `small.make_config` or a
field of ModelConfig.
"""

import argparse
import ast
import os

import numpy as np

from laneformer import ModelConfig
from laneformer.custom_calls.gpu.codes import CodesChoice
from laneformer.custom_calls.gpu.formats import Bf12Choice, product_weights
from tests.support import decode_cases, emulated, small
from tests.support.gpu_cases import WAYS, jitted, of_config, rounded, state_of

DTYPES = ("float32", "bfloat16", "float16")
CASES = {
    name: case
    for cases in vars(decode_cases).values()
    if isinstance(cases, dict)
    for name, case in cases.items()
    if isinstance(case, dict)
}


def difference(
    config: ModelConfig, weights: str = "float32", *, rows: int = 1, prompt: int = 11, drawn: int = 8, **options
) -> float:
    """The largest difference between the logits of the two kernels, over the largest logit. Raises AssertionError if
    their greedy tokens differ.

    weights: a dtype of DTYPES, "bf12", or a name of WAYS for quantized products. rows: of a pass of the GPU kernel;
    with several it checks drafts, of which every third is wrong. options: those of GpuSession (launch, machine, ...).
    """
    plan, arrays = of_config(config, weights if weights in DTYPES else "bfloat16" if weights == "bf12" else "float32")
    paths = [path for group in product_weights(plan) for path in group]
    if weights == "bf12":
        options["bf12"] = Bf12Choice.of(plan, arrays.items())
    elif weights in WAYS:
        # Latents' keys and values are made of one matrix, when it is packed, and stay as they are.
        records = {path: rounded(arrays[path], weights) for path in paths if path in arrays}
        arrays |= records
        options["codes"] = CodesChoice.of(plan, records.items())
    elif weights not in DTYPES:
        raise ValueError(f"unknown weights {weights!r}; choose {', '.join((*DTYPES, 'bf12', *WAYS))}")
    inputs = small.make_inputs(small.prompt_of(config, prompt), drawn)

    cpu = small.open_session(config, arrays["tok_embeddings"].dtype.name, threads=1)
    small.pack_all(cpu, arrays)
    expected, _ = small.jitted(cpu, room=drawn, logits=True)(inputs, state_of(plan, 64))
    gpu = emulated.open_session(plan, arrays, rows=rows, **options)
    if rows > 1:
        gpu.speculate(rows - 1, [1.0] * rows)
        given = [int(token + (n % 3 == 2)) % config.vocab_size for n, token in enumerate(expected.tokens)]
        inputs = small.make_inputs(small.prompt_of(config, prompt), drawn, given=given)
    found, _ = jitted(gpu, room=drawn, logits=True)(inputs, state_of(plan, 64))
    assert gpu.failure is None, gpu.failure
    assert found.tokens.tolist() == expected.tokens.tolist(), (found.tokens, expected.tokens)
    largest = np.abs(expected.logits).max()
    assert largest > 1e-4
    return float(np.abs(found.logits - expected.logits).max() / largest)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="*", metavar="CASE | FIELD=VALUE")
    parser.add_argument("--weights", default="float32", choices=(*DTYPES, "bf12", *WAYS))
    parser.add_argument("--launch", default="persistent", choices=("persistent", "graph", "overlapping graph"))
    parser.add_argument("--rows", type=int, default=1, help="rows of a pass")
    parser.add_argument("--prompt", type=int, default=11, help="tokens of the prompt")
    parser.add_argument("--code", default="ptx", choices=("ptx", "port"), help="what the emulated GPU runs")
    options = parser.parse_args()
    os.environ["EMULATOR_CODE"] = options.code
    changes = {}
    for word in options.model:
        name, given, value = word.partition("=")
        changes |= {name: parsed(value)} if given else CASES[name]
    config = small.make_config(**changes)
    found = difference(config, options.weights, launch=options.launch, rows=options.rows, prompt=options.prompt)
    print(f"equal tokens; logits differ by {found:.1e} of the largest")


def parsed(value: str):
    try:
        return ast.literal_eval(value)
    except (SyntaxError, ValueError):
        return value


if __name__ == "__main__":
    main()

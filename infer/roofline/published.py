"""Mixture-of-experts models as bytes per token, part by part, from their published dimensions; beside them the public
nominal figures.
"""

from dataclasses import dataclass

from laneformer.errors import ConfigError
from laneformer.formats import FORMATS

MODELS_READ = "2026-11"  # when the sources below were read


@dataclass(frozen=True)
class Part:
    """Weights that one token reads."""

    name: str
    weights: float
    precision: str

    @property
    def bytes(self) -> float:
        return self.weights * FORMATS[self.precision].bytes


@dataclass(frozen=True, kw_only=True)
class MoeModel:
    """One model at batch 1: what a token reads, and what is said of it."""

    name: str
    layers: int
    parts: tuple[Part, ...]
    source: str
    """Of the dimensions."""
    precision_source: str
    kv_full: int | None
    """Cached values that a token reads of every earlier position; None: the published dimensions do not say it."""
    kv_window: tuple[int, int] = (0, 0)
    """Values of a position in sliding layers, and their window."""
    state: int = 0
    """Values of recurrent state that a token reads and writes."""
    checkpoint: float | None
    """Bytes of the published checkpoint; None: not known."""
    nominal: dict[str, float]
    """Public nominal tokens per second on 8 of a device, at 0.357 of the effective bandwidth."""
    nominal_rule: str
    """Bytes behind the nominal figure, found by trying."""
    difference: str
    """Why the bottom-up figure is another."""

    @property
    def weight_bytes(self) -> float:
        return sum(part.bytes for part in self.parts)

    def kv_bytes(self, context: int, precision: str) -> float | None:
        """Read for one token, state read and written; None where it is not known."""
        if self.kv_full is None:
            return None if context else 0.0
        per_position, window = self.kv_window
        return FORMATS[precision].bytes * (
            self.kv_full * context + per_position * min(context, window) + 2 * self.state * (context > 0)
        )


MOE: dict[str, MoeModel] = {
    model.name: model
    for model in (
        MoeModel(
            name="qwen3-coder-next",
            layers=48,
            parts=(
                Part("routed experts, 10 of 512", 48 * 10 * 3 * 512 * 2048, "fp8"),
                Part("shared expert", 48 * 3 * 512 * 2048, "fp8"),
                Part("router", 48 * 512 * 2048, "bfloat16"),
                Part("attention, 12 layers, gated", 12 * 2048 * (2 * 16 * 256 + 2 * 2 * 256 + 16 * 256), "fp8"),
                Part(
                    "gated DeltaNet, 36 layers",
                    36 * (2048 * (2 * 16 * 128 + 3 * 32 * 128 + 2 * 32) + 4 * 2 * 32 * 128),
                    "fp8",
                ),
                Part("head", 151_936 * 2048, "bfloat16"),
            ),
            source="config.json copies on huggingface.co, as amd/Qwen3-Coder-Next-MXFP4",
            precision_source=(
                "FP8 matrices, BF16 router and head: an assumption, the types of each tensor were not seen"
            ),
            kv_full=12 * 2 * 2 * 256,
            state=36 * 32 * 128 * 128,
            checkpoint=None,
            nominal={"h200": 3650, "mi300x": 4000},
            nominal_rule="3.0 B weights at 1 byte = 3.00 GB",
            difference="3 B leaves out the output head (0.31 B, here in BF16) and rounds 3.25 B down",
        ),
        MoeModel(
            name="gpt-oss-120b",
            layers=36,
            parts=(
                Part("routed experts, 4 of 128", 36 * 4 * 3 * 2880 * 2880, "mxfp4"),
                Part("router", 36 * 128 * 2880, "bfloat16"),
                Part("attention", 36 * 2880 * 64 * (64 + 2 * 8 + 64), "bfloat16"),
                Part("head", 201_088 * 2880, "bfloat16"),
            ),
            source="docs.nvidia.com megatron-bridge gpt-oss",
            precision_source="experts MXFP4 at 4.25 bit, the rest BF16; OpenAI's card: 60.8 GiB checkpoint",
            kv_full=18 * 2 * 8 * 64,
            kv_window=(18 * 2 * 8 * 64, 128),
            checkpoint=60.8 * 2**30,
            nominal={"h200": 2200, "mi300x": 2400},
            nominal_rule="experts at 4.25 bit, the rest BF16 with the head = 5.00 GB",
            difference="the same rule as here; '5.1 B FP4' as a label would be 4,303 / 4,706 tok/s",
        ),
        MoeModel(
            name="deepseek-v4-flash",
            layers=43,
            parts=(
                Part("routed experts, 6 of 256", 43 * 6 * 3 * 2048 * 4096, "mxfp4"),
                Part("shared expert", 43 * 3 * 2048 * 4096, "fp8"),
                Part(
                    "attention, 64 heads of 512",
                    43 * (4096 * 1024 + 1024 * 64 * 512 + 4096 * 512 + 64 * 512 * 1024 + 8 * 1024 * 4096),
                    "fp8",
                ),
                # 21 layers join 4 positions, with an indexer of 64 heads of 128; 20 join 128; the first two join none
                Part(
                    "compressor and indexer",
                    21 * (4 * 4096 * 512 + 1024 * 64 * 128 + 4096 * 64 + 4 * 4096 * 128) + 20 * 2 * 4096 * 512,
                    "fp8",
                ),
                Part("router", 43 * 256 * 4096, "bfloat16"),
                Part("head", 129_280 * 4096, "bfloat16"),
            ),
            source=(
                "docs.nvidia.com automodel page; config copy"
                " inference-optimization/DeepSeek-V4-Flash-bf16-dequantized-5layers; the primary model card was not"
                " seen"
            ),
            precision_source=(
                "experts FP4, the rest FP8, some BF16 (anemll FP4-FP8 package page); which are BF16 is an assumption"
            ),
            kv_full=None,
            checkpoint=None,
            nominal={"h200": 1160, "mi300x": 1270},
            nominal_rule="routed and shared 7.575 B at 4.25 bit and 5.425 B in FP8 = 9.45 GB",
            difference=(
                "the nominal figure takes 13 B with the shared experts in FP4; here these are FP8 and head and router"
                " BF16. '13 B FP8' as a label would be 844 / 923 tok/s"
            ),
        ),
        MoeModel(
            name="kimi-k2.6",
            layers=61,
            parts=(
                Part("routed experts, 8 of 384", 60 * 8 * 3 * 2048 * 7168, "int4"),
                Part("shared expert", 60 * 3 * 2048 * 7168, "bfloat16"),
                Part("dense layer", 3 * 18_432 * 7168, "bfloat16"),
                Part(
                    "latent attention",
                    61
                    * (
                        7168 * 1536
                        + 1536 * 64 * (128 + 64)
                        + 7168 * (512 + 64)
                        + 512 * 64 * (128 + 128)
                        + 64 * 128 * 7168
                    ),
                    "bfloat16",
                ),
                Part("router", 60 * 384 * 7168, "bfloat16"),
                Part("head", 163_840 * 7168, "bfloat16"),
            ),
            source="docs.nvidia.com kimi_provider, dimensions of K2; the primary model card was not seen",
            precision_source=(
                "INT4 in groups of 32 in the routed experts, the rest BF16 (eatang/Kimi-K2.5-2layer, unsloth.ai)"
            ),
            kv_full=61 * (512 + 64),
            checkpoint=595e9,
            nominal={"h200": 325, "mi300x": 355},
            nominal_rule="routed 21.14 B at 4.5 bit and the rest of 32 B in BF16 = 33.6 GB",
            difference=(
                "32 B counts the embedding table, of which a token reads one row. 'Bounded near 2,000 tok/s on H200' is"
                " a ceiling at half a byte for every weight: 2.1 times from BF16 outside of the experts, 2.8 times from"
                " the share"
            ),
        ),
    )
}


def find_moe(name: str) -> list[MoeModel]:
    """The model of that name, or all of them. Raises ConfigError."""
    if name == "all":
        return list(MOE.values())
    if name not in MOE:
        raise ConfigError(f"--moe {name}: known are {', '.join(MOE)}, all")
    return [MOE[name]]

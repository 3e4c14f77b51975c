"""The stages of the check: what is built, tested and measured in under nine minutes. Needs only Python."""

from dataclasses import dataclass, replace

from scripts.gpu_check.stage import PYTHON, ROOT, Stage

BENCH = ROOT / "custom_calls" / "gpu" / "bench"
# Ring -> warps, lines of 512 bytes per slot, slots per warp (, 1: no fences); the first ring is the decode kernel's.
RINGS = {
    "micro": (8, 8, 6),
    "ring_unfenced": (8, 8, 6, 1),
    "ring_2k": (8, 4, 12),
    "ring_4k_128": (8, 8, 4),
    "ring_4k_64": (8, 8, 2),
    "ring_8k": (8, 16, 3),
    "ring_8k_4_warps": (4, 16, 6),
    "ring_16k_4_warps": (4, 32, 3),
}
# The reference must not be rounded to TF32, and several processes share the memory.
TESTS = {
    "LANEFORMER_TEST_GPU": "cuda",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
TEST_FILES = (
    "tests/custom_calls/gpu/test_session.py",
    "tests/custom_calls/gpu/test_steps.py",
    "tests/custom_calls/gpu/test_bf12.py",
    "tests/custom_calls/gpu/test_codes.py",
    "tests/custom_calls/gpu/test_experts.py",
    "tests/infer/engine/test_gpu.py",
)
# -vv names each finished test, since a stage may run out of time. pytest-benchmark warns about xdist, an error here.
PYTEST = (PYTHON, "-m", "pytest", "-vv", "-p", "no:cacheprovider", "-p", "no:benchmark")
SMALLEST = (*PYTEST, TEST_FILES[0], "-k", "test_layouts_match_the_interpreter and dtp")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Sizes that the stages measure: the real ones, or those of a rehearsal without a GPU."""

    backend: str
    """Native backend of `infer`."""
    others: tuple[str, ...]
    """Backends that are measured for comparison."""
    dtypes: tuple[str, str]
    """Dtype of the dense model's weights, and dtype for mixtures of experts and for formats of weights."""
    dense: str
    """Recipe of the dense model that decodes."""
    experts: str
    """Recipe of the mixture of experts that decodes."""
    hybrids: tuple[str, ...]
    """Recipes of mixtures of experts with gated DeltaNet, with latent and with compressed attention."""
    contexts: tuple[str, str, str]
    """Comma-separated prompt lengths: all for long answers, a single one of these, and those for short answers."""
    tokens: tuple[int, int]
    """Tokens of long and of short answers."""
    runs: tuple[int, int]
    """Runs of long and of short answers."""
    formats: tuple[str, ...]
    """Formats of weights."""
    trained: str
    """Recipe to train, with options for a smaller batch; accumulated parts have the same size as in the recipe."""
    layouts: tuple[str, ...]
    """Layouts to train the recipe with."""
    steps: int
    """Timed steps of training."""
    text: str
    """File that an answer repeats, for drafts from its prompt."""


GPU = Sizes(
    backend="cuda",
    others=("cuda-graph", "xla"),
    dtypes=("float16", "bfloat16"),
    dense="laneformer_2b",
    experts="gpt_oss_20b",
    hybrids=("qwen3_next_12", "deepseek_v3_4", "deepseek_v4_8"),
    # XLA reads a prompt in blocks of powers of two and compiles a program per block and cache size: these need few.
    contexts=("1025,3073,64", "1025", "64,3073"),
    tokens=(1023, 128),
    runs=(5, 3),
    formats=("bfloat16", "bf12", "int8", "int4", "fp8", "mxfp4", "nvfp4"),
    trained="laneformer_120m --data.batch-size 16 --accumulate 2",
    layouts=("laneformer", "dtp(4)", "tp"),
    steps=6,
    text="laneformer/executor.py",
)
REHEARSAL = Sizes(
    backend="cpu",
    others=("xla",),
    dtypes=("bfloat16", "bfloat16"),
    dense="stdlib",
    experts="moe_tiny",
    hybrids=("delta_tiny", "latent_tiny", "v4_tiny"),
    contexts=("17,65", "17", "17"),
    tokens=(8, 4),
    runs=(2, 1),
    formats=("int8",),
    trained=(
        "stdlib --data.batch-size 2 --data.sequence-length 64 --accumulate 2 --model.num-hidden-layers 2"
        " --mesh.host-devices 1 --mesh.lane 1"
    ),
    layouts=("laneformer",),
    steps=2,
    text="configs/delta.py",
)


def stages(sizes: Sizes = GPU) -> list[Stage]:
    """All stages, those that show most per second first; the last ones are left out if time runs out."""
    long, sustained = ("--context", sizes.contexts[1]), _answers(sizes, 0)
    short_answers = (*long, *_answers(sizes, 1))
    short = ("--dtype", sizes.dtypes[0], "--context", sizes.contexts[2], *_answers(sizes, 1))
    dense = ("--backend", sizes.backend, "--dtype", sizes.dtypes[0])
    drawn = (*dense, *long, *sustained, "--temperature", "0.8")
    other = ("--backend", sizes.backend, "--dtype", sizes.dtypes[1])
    everything = ("--context", sizes.contexts[0], *sustained, "--trace", "{out}/trace.json.gz")

    def bench(name: str, *options: str, model: str = sizes.dense) -> tuple[str, ...]:
        return (PYTHON, "-m", "infer", "bench", "--checkpoint", model, *options, "--json", f"{{out}}/{name}.json")

    compared = ",".join((sizes.backend, *sizes.others))
    overlapped = ("--compare", f"{sizes.backend},cuda-graph-overlap", *short)
    plot = (PYTHON, "-m", "scripts.plot_trace", "{out}/trace.json.gz", "--no-picture")
    hybrids = (bench(f"decode-{name}", *other, *short_answers, model=name) for name in sizes.hybrids)
    formats = (bench(f"decode-{name}", *other, "--weights", name, *long, *sustained) for name in sizes.formats)
    return [
        *_machine(),
        Stage("decode", 120, (bench("decode-float16", *dense, *everything),)),
        Stage("trace", 30, (plot,)),
        Stage("correctness", 130, ((*PYTEST, "-n", "4", *TEST_FILES),), TESTS),
        Stage("train", 300, _training(sizes)),
        Stage("compare", 140, (bench("compare-float16", "--compare", compared, *short),)),
        Stage("sampled", 80, (bench("sampled-float16", *drawn), bench("filtered-float16", *drawn, "--top-p", "0.95"))),
        Stage("experts", 240, (bench("decode-experts", *other, *long, *sustained, model=sizes.experts),)),
        Stage("hybrids", 300, tuple(hybrids)),
        Stage("rank", 90, (_rank(sizes),)),
        Stage("formats", 420, tuple(formats)),
        rows(sizes),
        Stage("overlap", 70, (bench("overlap-float16", *overlapped),)),
        _checker("memcheck"),
        _checker("racecheck"),
    ]


def rehearsed() -> list[Stage]:
    """The stages that need no GPU, in tiny sizes on a CPU."""
    names = ("decode", "trace", "train", "experts", "hybrids", "formats", "rows")
    busy = 600  # seconds for a stage, enough on a busy machine
    return [replace(stage, seconds=busy) for stage in stages(REHEARSAL) if stage.name in names]


def rows(sizes: Sizes) -> Stage:
    """A stage that measures passes by their number of rows, then an answer that repeats its prompt, with drafts from
    the text and without.

    It runs only if named, because drafts are not the default on a GPU.
    """
    folder = "{out}/rows"
    source = str(ROOT / "laneformer")
    tokenizer = (PYTHON, "-m", "scripts.tokenize", "--out", folder, source, "--glob", "*.py")
    same = str(ROOT / sizes.text)
    text = ("--text", same, "--prompt-file", same, "--tokenizer", f"{folder}/tokenizer.json")
    model = ("--checkpoint", sizes.dense, "--backend", sizes.backend, "--dtype", sizes.dtypes[0])
    command = (PYTHON, "-m", "infer", "bench", *model, *text, *_answers(sizes, 1))
    measured = ((*command, *drafts, "--json", f"{{out}}/{name}.json") for name, drafts in ROWS.items())
    passes = (PYTHON, "-m", "scripts.gpu_rows", sizes.dense, "--rows", "1", "2", "--json", "{out}/gpu_rows.json")
    prices = (passes,) if sizes.backend == "cuda" else ()
    return Stage("rows", 240, (*prices, tokenizer, *measured), usual=False)


ROWS = {"rows-drafts": ("--draft-max", "1"), "rows-one": ("--no-speculation",)}


def _answers(sizes: Sizes, kind: int) -> tuple[str, ...]:
    """Options of bench for long (0) or short (1) answers."""
    runs = ("--runs", str(sizes.runs[kind]), "--warmup-runs", "1")
    return ("--output-tokens", str(sizes.tokens[kind]), *runs)


def _machine() -> list[Stage]:
    """Stages that describe the machine, run the kernels once, and measure the speed of its parts."""
    name = (PYTHON, "-c", "import jax; print(jax.__version__, jax.devices())")
    build = (PYTHON, "-m", "custom_calls"), *(_nvcc(*ring) for ring in RINGS.items())
    smoke, micro = (("{out}/micro", "--quick", "ring", "edge"), SMALLEST), (("{out}/micro",),)
    micro += tuple((f"{{out}}/{name}", "ring") for name in RINGS if name != "micro")
    return [
        Stage("machine", 30, (("nvidia-smi",), ("nvcc", "--version"), name)),
        Stage("build", 100, build, together=True),
        Stage("smoke", 60, smoke, TESTS, if_failed=("memcheck", "racecheck")),
        Stage("micro", 50, micro),
    ]


def _nvcc(name: str, ring: tuple[int, ...]) -> tuple[str, ...]:
    """The compiler's command for the microbenchmarks with a ring."""
    options = zip(("WARPS", "SLOT_LINES", "SLOTS", "UNFENCED"), ring, strict=False)
    target = ("-std=c++17", "-O3", "--cudart", "static", "-gencode=arch=compute_90a,code=sm_90a", "--diag-suppress=186")
    defined = (f"-DLF_{option}={value}" for option, value in options)
    include = (f"-I{folder}" for folder in (BENCH, BENCH.parent / "kernel", BENCH.parent / "kernel" / "pass"))
    return ("nvcc", *target, *defined, *include, str(BENCH / "micro.cu"), "-o", f"{{out}}/{name}")


def _training(sizes: Sizes) -> tuple[tuple[str, ...], ...]:
    """Commands that time steps by layout, then project memory and speed of the first layout by a dry run.

    Each writes its own file, because time may run out.
    """
    recipe = sizes.trained.split()
    dry_run = (PYTHON, "-m", "train", *recipe, "--dry-run", "--cluster.device", "{device}")
    timed = (PYTHON, "-m", "train.bench", sizes.trained, "--no-dense", "--rounds", "1", "--steps", str(sizes.steps))
    return (
        *((*timed, "--layouts", each, "--json", f"{{out}}/train-{n}.json") for n, each in enumerate(sizes.layouts)),
        (*dry_run, "--model.layout", sizes.layouts[0], "--json", "{out}/plan-0.json"),
    )


def _rank(sizes: Sizes) -> tuple[str, ...]:
    options = ("--delays", "0", "2", "5", "10", "20", "--runs", "3", "--json", "{out}/rank.json")
    return (PYTHON, "-m", "scripts.gpu_rank", sizes.dense, *options)


def _checker(name: str) -> Stage:
    """A stage that runs a tool of compute-sanitizer on the project's kernels only, not on driver calls of XLA."""
    only = ("--kernel-name", "kns=laneformer", "--report-api-errors", "no", "--launch-timeout", "0")
    command = ("compute-sanitizer", "--tool", name, *only, "--error-exitcode", "9", *SMALLEST)
    return Stage(name, 90, (command,), TESTS, may_time_out=True)

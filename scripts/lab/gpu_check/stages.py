"""The stages of the check: what is built, tested and measured, in two calls of some minutes. Needs only Python."""

from dataclasses import dataclass, replace

from laneformer.commands.lab.gpu_check.stage import CACHE, PYTHON, ROOT, Stage
from laneformer.custom_calls.gpu.compile import NVIDIA_FLAGS

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
CALLS = {1: 420, 2: 300}  # seconds in which each call ends
# The reference must not be rounded to TF32, and several processes share the memory.
TESTS = {
    "LANEFORMER_TEST_GPU": "cuda",
    "JAX_DEFAULT_MATMUL_PRECISION": "highest",
    "XLA_PYTHON_CLIENT_PREALLOCATE": "false",
}
# Choosing kernels for prompts by measuring them takes longer than the answers.
QUICK = CACHE | {"XLA_FLAGS": "{xla_flags} --xla_gpu_autotune_level=0"}
SHARED = CACHE | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}  # for tools that need memory too
TEST_FILES = (
    "tests/custom_calls/gpu/test_session.py",
    "tests/custom_calls/gpu/test_steps.py",
    "tests/custom_calls/gpu/test_bf12.py",
    "tests/custom_calls/gpu/test_codes.py",
    "tests/custom_calls/gpu/test_experts.py",
    "tests/infer/engine/test_gpu.py",
)
# -vv names each finished test, since a stage may run out of time. pytest-benchmark warns about xdist. Warnings are no
# errors here, because JAX's about a GPU say nothing about the kernel.
PYTEST = (PYTHON, "-m", "pytest", "-vv", "-W", "default", "-p", "no:cacheprovider", "-p", "no:benchmark")
RUNGS = ("tiny", "laneformer", "tp", "dtp")  # of ladder.py, which needs JAX
# Variants of the kernel; the first is the kernel as it is. No multiprocessor is left for the spare writer beside
# emulated lanes.
VARIANTS = ("none", "out-of-line", "triples", "spare-writer")
RANK_VARIANTS = VARIANTS[:3]
TOOLS = ("nvcc", "ncu", "compute-sanitizer", "cuda-gdb", "cuobjdump")
DESCRIBE = (
    "import platform, shutil, jax; print('Python', platform.python_version(), 'JAX', jax.__version__, jax.devices());"
    " print('Tools not found:', *[tool for tool in {tools} if not shutil.which(tool)] or ['none'])"
)
SECTIONS = ("SpeedOfLight", "WarpStateStats", "MemoryWorkloadAnalysis", "SourceCounters")
NO_PROFILER = ("ERR_NVGPUCTRPERM", "LibraryNotLoaded", "Device not supported")


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
    contexts: tuple[str, str]
    """Comma-separated prompt lengths of the dense model, and the shortest one."""
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
    # The kernel reads a prompt of 64 alone. XLA reads longer ones in blocks of powers of two and compiles a program per
    # block and cache size: these need few.
    contexts=("64,1025,3073", "64"),
    tokens=(1023, 128),
    runs=(3, 3),
    formats=("bf12", "int4", "mxfp4"),
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
    contexts=("17,65", "17"),
    tokens=(8, 4),
    runs=(2, 1),
    formats=(),
    trained=(
        "stdlib --data.batch-size 2 --data.sequence-length 64 --accumulate 2 --model.num-hidden-layers 2"
        " --mesh.host-devices 1 --mesh.lane 1"
    ),
    layouts=("laneformer",),
    steps=2,
    text="configs/delta.py",
)


def stages(sizes: Sizes = GPU) -> list[Stage]:
    """All stages, those of a call in the order in which they run."""
    return [*_first(sizes), *_second(sizes), *_others(sizes)]


def _first(sizes: Sizes) -> list[Stage]:
    """Call 1: whether the kernel works, how fast it is, and why."""
    dense = ("--backend", sizes.backend, "--dtype", sizes.dtypes[0])
    everything = ("--context", sizes.contexts[0], *_answers(sizes, 0), "--trace", "{out}/trace.json.gz")
    plot = (PYTHON, "-m", "scripts.plot_trace", "{out}/trace.json.gz", "--no-picture")
    torch = (PYTHON, "-m", "scripts.gpu_check.torch_graph", sizes.dense, "--context", sizes.contexts[1])
    options = {"environment": QUICK, "call": 1}
    return [
        *_machine(sizes),
        Stage(
            "ladder",
            80,
            tuple((PYTHON, "-m", "scripts.gpu_check.ladder", rung) for rung in RUNGS),
            TESTS | CACHE,
            expected=25,
            each=20,
            stops=True,
            dumps=True,
            if_failed=("memcheck", "synccheck"),
            ends=True,
            call=1,
        ),
        Stage("decode", 180, (_bench(sizes, "decode-float16", *dense, *everything),), expected=60, **options),
        Stage("trace", 20, (plot,), expected=5, call=1),
        Stage("baseline", 60, ((*torch, "--json", "{out}/torch.json"),), expected=25, optional=True, call=1),
        Stage("rank", 90, (_rank(sizes),), expected=45, call=1),
        Stage("variants", 90, _variants(sizes), expected=40, call=1),
        *_compared(sizes),
        _profile(sizes),
    ]


def _second(sizes: Sizes) -> list[Stage]:
    """Call 2: all microbenchmarks, other weights and models, and the tests."""
    dense = ("--backend", sizes.backend, "--dtype", sizes.dtypes[0])
    short = ("--context", sizes.contexts[1], *_answers(sizes, 1))
    drawn = (*dense, *short, "--temperature", "0.8")
    other = ("--backend", sizes.backend, "--dtype", sizes.dtypes[1])
    experts = _bench(sizes, "decode-experts", *other, *short, model=sizes.experts)
    sampled = _bench(sizes, "sampled-float16", *drawn), _bench(sizes, "filtered-float16", *drawn, "--top-p", "0.95")
    formats = ("--weights", *sizes.formats)
    compile_formats = (PYTHON, "-m", "scripts.gpu_decode", sizes.dense, "--compile-only", "--weights")
    built = (PYTHON, "-m", "custom_calls"), *(_nvcc(*ring) for ring in RINGS.items())
    built += tuple((*compile_formats, name) for name in sizes.formats)
    micro = ("{out}/micro",), *((f"{{out}}/{name}", "ring") for name in RINGS if name != "micro")
    return [
        Stage("build-rest", 60, built, expected=20, together=True, call=2),
        Stage("micro-all", 60, micro, expected=40, call=2),
        Stage("formats", 90, (_kernel(sizes, 1, "formats", *formats),), expected=40, call=2),
        Stage("experts", 90, (experts,), QUICK, expected=45, call=2),
        Stage("sampled", 60, sampled, QUICK, expected=30, call=2),
        rows(sizes),
        replace(_checker("racecheck"), expected=25, call=2),
        Stage(
            "correctness",
            90,
            ((*PYTEST, "-n", "4", *TEST_FILES),),
            TESTS,
            expected=45,
            may_time_out=True,
            takes_rest=True,
            call=2,
        ),
    ]


def _others(sizes: Sizes) -> list[Stage]:
    """Stages that diagnose a failed one, or that run only with --stages."""
    other = ("--backend", sizes.backend, "--dtype", sizes.dtypes[1])
    short = ("--context", sizes.contexts[1], *_answers(sizes, 1))
    hybrids = (_bench(sizes, f"decode-{name}", *other, *short, model=name) for name in sizes.hybrids)
    overlapped = ("--compare", f"{sizes.backend},cuda-graph-overlap", "--dtype", sizes.dtypes[0], *short)
    return [
        _checker("memcheck"),
        _checker("synccheck"),
        Stage("train", 300, _training(sizes)),
        Stage("hybrids", 300, tuple(hybrids)),
        Stage("overlap", 70, (_bench(sizes, "overlap-float16", *overlapped),), QUICK),
    ]


def rehearsed() -> list[Stage]:
    """The stages that need no GPU, in tiny sizes on a CPU."""
    names = ("decode", "trace", "train", "experts", "hybrids", "rows")
    busy = 600  # seconds for a stage, enough on a busy machine
    return [replace(stage, seconds=busy, expected=0, call=1) for stage in stages(REHEARSAL) if stage.name in names]


def rows(sizes: Sizes) -> Stage:
    """A stage that measures passes by their number of rows, then an answer that repeats its prompt, with drafts from
    the text and without.
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
    return Stage("rows", 80, (*prices, tokenizer, *measured), QUICK, expected=40, call=2)


RANKED = ("laneformer", "tp")
ROWS = {"rows-drafts": ("--draft-max", "1"), "rows-one": ("--no-speculation",)}


def _answers(sizes: Sizes, kind: int) -> tuple[str, ...]:
    """Options of bench for long (0) or short (1) answers."""
    runs = ("--runs", str(sizes.runs[kind]), "--warmup-runs", "1")
    return ("--output-tokens", str(sizes.tokens[kind]), *runs)


def _bench(sizes: Sizes, name: str, *options: str, model: str = "") -> tuple[str, ...]:
    """The benchmark of an engine. model: a recipe, by default the dense one."""
    bench = (PYTHON, "-m", "infer", "bench", "--checkpoint", model or sizes.dense)
    return (*bench, *options, "--json", f"{{out}}/{name}.json")


def _kernel(sizes: Sizes, dtype: int, name: str, *options: str) -> tuple[str, ...]:
    """The benchmark of the kernel alone. dtype: place in `Sizes.dtypes`."""
    measured = (PYTHON, "-m", "scripts.gpu_decode", sizes.dense, "--dtype", sizes.dtypes[dtype])
    return (*measured, "--context", sizes.contexts[1], *options, "--json", f"{{out}}/{name}.json")


def _machine(sizes: Sizes) -> list[Stage]:
    """Stages that describe the machine, compile everything of call 1, and measure the speed of its parts."""
    known = (PYTHON, "-c", DESCRIBE.format(tools=TOOLS))
    state = ("nvidia-smi", "-q", "-d", "CLOCK,ECC,PAGE_RETIREMENT")
    kernels = tuple((PYTHON, "-m", "scripts.gpu_check.ladder", rung, "--compile-only") for rung in RUNGS)
    alone = (PYTHON, "-m", "scripts.gpu_decode", sizes.dense, "--dtype", sizes.dtypes[0], "--compile-only")
    kernels += (*((*alone, "--variants", variant) for variant in VARIANTS), (*alone, "--launch", "graph"))
    lane = (PYTHON, "-m", "scripts.gpu_rank", sizes.dense, "--compile-only", "--layouts")
    kernels += tuple((*lane, layout) for layout in RANKED)
    kernels += tuple((*lane, RANKED[0], "--variants", variant) for variant in RANK_VARIANTS[1:])
    build = ((PYTHON, "-m", "custom_calls"), _nvcc("micro", RINGS["micro"]), *kernels)
    quick = ("{out}/micro", "--quick", "ring", "copy", "edge", "lanes", "torn")
    return [
        Stage("machine", 30, (("nvidia-smi",), state, ("nvcc", "--version"), known), expected=10, call=1),
        Stage("build", 70, build, expected=25, together=True, call=1),
        Stage("micro", 40, (quick,), expected=15, call=1),
    ]


def _compared(sizes: Sizes) -> list[Stage]:
    """Stages that compare the kernel with each other backend, in separate records. XLA may choose its kernels by
    measuring.
    """
    short = ("--dtype", sizes.dtypes[0], "--context", sizes.contexts[1], *_answers(sizes, 1))
    return [
        Stage(
            f"compare-{other}",
            100,
            (_bench(sizes, f"compare-{other}", "--compare", f"{sizes.backend},{other}", *short),),
            CACHE if other == "xla" else QUICK,
            expected=60,
            call=1,
        )
        for other in sizes.others
    ]


def _profile(sizes: Sizes) -> Stage:
    """A stage that profiles one launch of the kernel, and prints its metrics and where its warps wait."""
    launch = ("--kernel-name", "laneformer_decode", "--launch-skip", "1", "--launch-count", "1")
    sections = tuple(word for section in SECTIONS for word in ("--section", section))
    answer = (PYTHON, "-m", "scripts.gpu_decode", sizes.dense, "--dtype", sizes.dtypes[0], "--context")
    answer += (sizes.contexts[1], "--tokens", "8", "--runs", "1")
    saved = ("--export", "{out}/ncu", "--force-overwrite")
    pages = tuple(("ncu", "--import", "{out}/ncu.ncu-rep", "--page", page, "--csv") for page in ("raw", "source"))
    return Stage(
        "ncu",
        60,
        (("ncu", "--clock-control", "none", *launch, *sections, *saved, *answer), *pages),
        SHARED,
        expected=40,
        stops=True,
        optional=True,
        excuses=NO_PROFILER,
        call=1,
    )


def _nvcc(name: str, ring: tuple[int, ...]) -> tuple[str, ...]:
    """The compiler's command for the microbenchmarks with a ring."""
    options = zip(("WARPS", "SLOT_LINES", "SLOTS", "UNFENCED"), ring, strict=False)
    target = (*NVIDIA_FLAGS, "-O3", "--cudart", "static", "-gencode=arch=compute_90a,code=sm_90a")
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
    options = ("--layouts", *RANKED, "--delays", "0", "5", "20", "--runs", "3", "--json", "{out}/rank.json")
    return (PYTHON, "-m", "scripts.gpu_rank", sizes.dense, *options)


def _variants(sizes: Sizes) -> tuple[tuple[str, ...], ...]:
    """Commands that measure variants beside the kernel as it is: the whole model, and one of eight lanes, in which
    exchanges and edges weigh more.
    """
    lane = (PYTHON, "-m", "scripts.gpu_rank", sizes.dense, "--layouts", RANKED[0], "--delays", "0", "--runs", "3")
    return (
        _kernel(sizes, 0, "variants", "--variants", *VARIANTS),
        (*lane, "--variants", *RANK_VARIANTS, "--json", "{out}/variants-rank.json"),
    )


def _checker(name: str) -> Stage:
    """A stage that runs a tool of compute-sanitizer on the smallest call, and only on the project's kernels, not on
    driver calls of XLA. Checked kernels are slow, so their own watchdog waits longer.
    """
    only = ("--kernel-name", "kns=laneformer", "--report-api-errors", "no", "--launch-timeout", "0")
    call = (PYTHON, "-m", "scripts.gpu_check.ladder", "tiny", "--prompt", "2", "--tokens", "2", "--timeout-ms", "60000")
    command = ("compute-sanitizer", "--tool", name, *only, "--error-exitcode", "9", *call)
    return Stage(name, 45, (command,), TESTS, may_time_out=True, optional=True, excuses=NO_PROFILER)

"""The programs of a machine with a GPU, as far as scripts.gpu_check uses them: this file under the name of each.

FAKE in the environment names what goes wrong: `hang` (the ladder's second command), `fail` (its first one),
`no permission` (the profiler), `stall` (the stage decode, whose process id is then in a file).
"""

import json
import os
import stat
import sys
import time
from pathlib import Path

name, words = Path(sys.argv[0]).name, sys.argv[1:]
wrong = os.environ.get("FAKE", "")
DEVICE = {"device": "NVIDIA H200", "memory_bytes": 150_754_820_096, "clocks": "SM 1980 of 1980 MHz"}


def after(option):
    return words[words.index(option) + 1]


def micro():
    machine = {"test": "machine", "device": "NVIDIA H200", "memory_bytes": 150_754_820_096}
    print(json.dumps(machine | {"sm_mhz_seen": 1980, "sm_mhz_most": 1980}))
    for test, median, rate in (("ring", 250.0, 4100.0), ("copy", 500.0, 4000.0), ("edge", 1.5, None)):
        line = {"test": test, "unit": "us", "ctas": 128, "median": median, "min": median, "p95": median}
        print(json.dumps(line | ({"gb_per_s": rate} if rate else {"form": "tags"})))


def bench(backend):
    conditions = {
        "model": {"name": after("--checkpoint")},
        "engine": {"backend": backend},
        "hardware": DEVICE,
        "prompt_tokens": 64,
    }
    metrics = {"decode_tps": {"sustained_median": 500.0}, "mbu": {"bytes_per_token": 4e9}}
    return {"schema": "laneformer.bench/1", "conditions": conditions, "metrics": metrics, "notes": []}


def kernel(**told):
    times = {"median": 2000.0, "min": 2000.0, "max": 2000.0}
    return told | DEVICE | {"us_per_token": times, "bytes_per_token": 4e9, "context": 64, "weights": "random float16"}


def python():
    module = words[1] if words[0] == "-m" else ""
    if module == "scripts.gpu_check.ladder" and "--compile-only" not in words:
        ladder(words[2])
    if words[0] == "-c":
        print("JAX 0.0 [CudaDevice(id=0)]")
    if wrong == "stall" and module == "infer":
        print("it started", flush=True)
        (Path(after("--json")).parent / "started").write_text(str(os.getpid()))
        time.sleep(60)
    if module == "pytest":
        print("[gw0] [ 50%] PASSED tests/a.py::test_one \n[gw1] [100%] FAILED tests/a.py::test_two[1] ")
        sys.exit(1)
    if module == "scripts.plot_trace":
        print("| op | us |\n|---|---|\n| qkv | 1.0 |")
    if "--json" not in words:
        return
    found = {
        "infer": lambda: [
            bench(each) for each in (after("--compare").split(",") if "--compare" in words else ["cuda"])
        ],
        "scripts.gpu_check.torch_graph": lambda: [kernel(test="torch", way="CUDA graph")],
        "scripts.gpu_rank": lambda: [kernel(layout="tp", delay_us=5)],
        "scripts.gpu_decode": lambda: [kernel(test="decode", variant="none"), kernel(test="decode", variant="triples")],
        "scripts.gpu_rows": lambda: [{"rows": 1}],
    }[module]()
    Path(after("--json")).write_text(json.dumps(found))


def ladder(rung):
    if wrong == "fail" and rung == "tiny":
        print("error: lane 0, layer 0: timed out; stuck: CTAs 0-3 of lane 0: part of lane 1, waits for tag 7, has 6")
        sys.exit(2)
    if wrong == "hang" and rung == "laneformer":
        pipe = os.environ["CUDA_COREDUMP_PIPE"].replace("%p", str(os.getpid()))
        os.mkfifo(pipe)
        print("4 CTAs of 64 threads", flush=True)
        with open(pipe, "rb") as asked:
            assert asked.read(1) == b"1"
        Path(os.environ["CUDA_COREDUMP_FILE"].replace("%p", str(os.getpid()))).write_bytes(b"core")
        time.sleep(60)
    print(f"{rung}: 4 tokens")


def nvcc():
    if "-o" in words:
        target = Path(after("-o"))
        target.write_text(Path(sys.argv[0]).read_text())
        target.chmod(target.stat().st_mode | stat.S_IXUSR)


def ncu():
    if "--export" in words:
        if wrong == "no permission":
            print("==ERROR== ERR_NVGPUCTRPERM - The user does not have permission to access NVIDIA GPU counters")
            sys.exit(1)
        Path(after("--export") + ".ncu-rep").write_bytes(b"report")
    elif after("--page") == "raw":
        stall = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
        columns = ["ID", "Kernel Name", "dram__bytes_read.sum", stall.format("long_scoreboard"), stall.format("membar")]
        print("==PROF== Connected")
        for row in (columns, ["", "", "Gbyte", "inst", "inst"], ["0", "laneformer_decode", "4.4", "3.25", "0.5"]):
            print(",".join(f'"{cell}"' for cell in row))
    else:
        print('"#","Source","# Samples","stall_long_sb","stall_membar"')
        print('"1","LDG.E.128 R4, [R2.64]","90","80","10"\n"2","MEMBAR.SC.SYS","10","0","10"')


{
    "python": python,
    "nvcc": nvcc,
    "ncu": ncu,
    "nvidia-smi": lambda: print("NVIDIA H200"),
    "cuda-gdb": lambda: print("Warps: kernel.cu:123 in read_words", *words),
    "compute-sanitizer": lambda: print("========= ERROR SUMMARY: 0 errors"),
}.get(name, micro)()

"""python -m infer generate, as a user runs it, on a small saved checkpoint."""

import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import threading

import pytest

import laneformer
from laneformer import custom_calls, infer
from laneformer.infer.__main__ import main
from tests.support.checkpoints import save_checkpoint
from tests.support.paths import PYTHON, ROOT

PROMPT = "def add(a, b):"
SAMPLING = ("--temperature", "1", "--seed", "3")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    """A checkpoint with random weights and a tokenizer of single bytes."""
    return save_checkpoint(tmp_path_factory.mktemp("checkpoints") / "small", bos_token_id=0)


@pytest.fixture(scope="module")
def engine(checkpoint):
    return infer.Engine.load(checkpoint)


def command(*args):
    return [*PYTHON, "-m", "infer", *map(str, args)]


def run(*args, text=None):
    return subprocess.run(
        command(*args), cwd=ROOT, input=text, capture_output=True, text=True, timeout=120, check=False, encoding="utf-8"
    )


def test_text_goes_to_stdout_and_summary_to_stderr(checkpoint, engine):
    done = run("generate", "--checkpoint", checkpoint, "--prompt", "-", "--max-new-tokens", 40, *SAMPLING, text=PROMPT)
    assert done.returncode == 0, done.stderr
    expected = engine.generate(PROMPT, max_new_tokens=40, sampling=infer.Sampling(temperature=1.0, seed=3)).result
    assert done.stdout == expected.text + "\n"
    log, summary = done.stderr.splitlines()
    name = re.fullmatch(r"backend (cpu|xla) \(auto\)", log)[1]
    for part in (
        "40 tokens (length)",
        "tokens/s sustained",
        "first token after",
        "small: ",
        " parameters",
        "weights float32",
        f"backend {name}",
        "1 x ",
        "batch 1",
        f"prompt {len(PROMPT)} tokens",
        "context 20000",
        f"{'no speculative decoding' if name == 'xla' else ' drafts accepted'}; temperature 1.0, seed 3",
    ):
        assert part in summary


@pytest.mark.skipif(custom_calls.unavailable() is not None, reason=str(custom_calls.unavailable()))
def test_drafts_are_reported_with_the_speed(checkpoint, capsys, monkeypatch):
    """Without noise, random weights repeat themselves, so drafts copied from the text are right."""
    speculate = custom_calls.Session.speculate  # fixed prices, because other tests change the times of passes
    monkeypatch.setattr(custom_calls.Session, "speculate", lambda self, most: speculate(self, most, [1.0] * 16))
    args = ["generate", "--checkpoint", str(checkpoint), "--backend", "cpu", "--prompt", PROMPT, "--max-new-tokens"]
    answers = []
    for drafts in (["--no-speculation"], ["--draft-max", "0"], ["--draft-max", "3"], []):
        assert main([*args, "200", *drafts]) == 0
        out, err = capsys.readouterr()
        answers.append(out)
        found = re.search(r"([\d.]+) tokens per pass, (\d+) of (\d+) drafts accepted", err)
        assert bool(found) == (not drafts or "3" in drafts) != ("no speculative decoding" in err)
    assert len(set(answers)) == 1 and float(found[1]) > 1 and 0 < int(found[2]) <= int(found[3])
    assert main([*args, "200", "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    counts = report["drafting"]
    assert report["tokens_per_pass"] == 199 / counts["passes"] > 1 and report["conditions"]["speculation"] == 15
    assert sum(counts["accepted"]) + counts["passes"] == 199 and report["text"] + "\n" == answers[0]


def test_json_reports_the_stop_string_on_eight_devices(checkpoint, engine, capsys, monkeypatch):
    text = engine.generate(PROMPT, max_new_tokens=30, sampling=infer.Sampling(temperature=1.0)).result.text
    start = next(n for n in range(5, 25) if text[n : n + 2].isprintable() and text.find(text[n : n + 2]) == n)
    monkeypatch.setattr("laneformer.infer.engine.job.use_host_devices", lambda count: None)  # devices are set already
    args = ["generate", "--checkpoint", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", "30", "--json"]
    stops = ["--stop", text[start : start + 2], "--stop", "never"]
    assert main([*args, "--temperature", "1", "--devices", "8", *stops]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["text"] == text[:start] and report["stop_reason"] == text[start : start + 2]
    assert report["conditions"]["devices"] == 8 and report["conditions"]["sampling"]["temperature"] == 1.0


@pytest.mark.slow
def test_json_has_top_logprobs_in_bfloat16(checkpoint, capsys):
    args = ["generate", "--checkpoint", str(checkpoint), "--prompt-ids", "1,2", "--max-new-tokens", "3"]
    assert main([*args, "--backend", "xla", "--json", "--compute", "bfloat16", "--top-logprobs", "2"]) == 0
    report = json.loads(capsys.readouterr().out)
    engine = infer.Engine.load(checkpoint, "xla", precision=laneformer.Precision(compute="bfloat16"))
    result = engine.generate([1, 2], max_new_tokens=3, top_logprobs=2).result
    assert report["tokens"] == list(result.tokens)
    assert report["top_logprobs"] == [[list(pair) for pair in top] for top in result.top_logprobs]
    assert report["conditions"]["weights_dtype"] == "float32" and report["conditions"]["compute_dtype"] == "bfloat16"


def test_summary_names_the_compute_dtype(checkpoint, capsys):
    short = ("generate", "--checkpoint", str(checkpoint), "--prompt", PROMPT, "--max-new-tokens", "1")
    assert main([*short, "--backend", "xla", "--compute", "float16"]) == 0
    assert "weights float32, products in float16; backend xla" in capsys.readouterr().err


@pytest.fixture
def reader(monkeypatch):
    """reader(n, act) makes standard output a pipe: another thread reads n bytes, calls act(), and reads the rest unless
    act has closed the pipe. It returns a function that returns all that was read, after the end of the output.
    """
    with contextlib.ExitStack() as stack:

        def start(count, act):
            ours, theirs = os.pipe()
            source = stack.enter_context(open(ours, "rb", buffering=0))
            out = stack.enter_context(open(theirs, "w", encoding="utf-8"))
            monkeypatch.setattr("sys.stdout", out)
            found = []

            def read():
                while len(b"".join(found)) < count:
                    found.append(source.read(count))
                act(source)
                while not source.closed and (more := source.read(1 << 16)):
                    found.append(more)

            thread = threading.Thread(target=read)
            thread.start()

            def finish():
                out.close()
                thread.join(60)
                return b"".join(found)

            return finish

        yield start


LONG = ("--prompt", PROMPT, "--max-new-tokens", "19000", "--temperature", "1")


def test_control_c_ends_with_a_summary(checkpoint, capsys, reader):
    main_thread = threading.main_thread().ident
    finish = reader(12, lambda source: signal.pthread_kill(main_thread, signal.SIGINT))
    assert main(["generate", "--checkpoint", str(checkpoint), *LONG]) == 130
    err = capsys.readouterr().err
    assert 12 <= len(finish()) < 19000 and "(cancelled)" in err and "Traceback" not in err


def test_closed_pipe_exits_quietly(checkpoint, capsys, reader):
    finish = reader(1, lambda source: source.close())
    assert main(["generate", "--checkpoint", str(checkpoint), *LONG]) == 141
    assert "Traceback" not in capsys.readouterr().err and len(finish()) < 19000


@pytest.mark.parametrize(
    "args, message",
    [
        ((), "--prompt, --prompt-file and --prompt-ids"),
        (("--prompt", "a", "--prompt-ids", "1"), "give one of"),
        (("--prompt-ids", "1,x"), "got 1,x"),
        (("--prompt-ids", "1,999"), "token id 999 is outside the vocabulary"),
        (("--prompt", "a", "--max-new-tokens", "0"), "max_new_tokens = 0"),
        (("--prompt", "a", "--backend", "cuda"), "backend cuda is not available"),
        (("--prompt", "a", "--top-logprobs", "2"), "--top-logprobs needs --json"),
        (("--prompt", "a", "--json", "--top-logprobs", "21"), "top_logprobs = 21"),
        (("--prompt", "a", "--devices", "0"), "--devices must be at least 1, got 0"),
        (("--prompt", "a", "--devices", "3"), "must divide 8 lanes; choose 1, 2, 4, 8"),
        (("--prompt", "a", "--distributed"), "cannot join the other processes"),
        (("--prompt-file", "/nonexistent"), "No such file"),
    ],
)
def test_errors_are_one_line(checkpoint, capsys, monkeypatch, args, message):
    monkeypatch.setattr("laneformer.infer.engine.job.use_host_devices", lambda count: None)  # devices are set already
    assert main(["generate", "--checkpoint", str(checkpoint), "--backend", "xla", *args]) == 2
    err = capsys.readouterr().err
    assert err.startswith("error: ") and message in err and err.count("\n") == 1


def test_missing_checkpoint_and_unknown_command_are_errors(capsys, tmp_path):
    assert main(["generate", "--checkpoint", str(tmp_path / "no"), "--prompt", "a"]) == 2
    assert "is not a folder" in capsys.readouterr().err
    assert main(["translate"]) == 2
    assert capsys.readouterr().err == "error: unknown command 'translate'; python -m infer --help lists all commands\n"
    assert main(["benhc"]) == 2 and capsys.readouterr().err.endswith("'benhc'; did you mean bench?\n")
    assert main([]) == 2 and main(["--help"]) == 0
    listed = capsys.readouterr().out
    assert all(f"\n  {name} " in listed for name in ("generate", "bench", "serve", "humaneval", "agent"))


def test_help_shows_every_option(capsys, monkeypatch):
    monkeypatch.setitem(os.environ, "COLUMNS", "160")
    with pytest.raises(SystemExit) as ended:
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    assert ended.value.code == 0
    for option in (
        "--checkpoint DIR",
        "--prompt STR",
        "--prompt-file FILE",
        "--prompt-ids STR",
        "--max-new-tokens INT",
        "--stop STR",
        "--temperature FLOAT",
        "--top-k INT",
        "--top-p FLOAT",
        "--min-p FLOAT",
        "--repetition-penalty FLOAT",
        "--seed INT",
        "--backend STR",
        "--devices INT",
        "--dtype",
        "--compute",
        "--top-logprobs INT",
        "--json",
    ):
        assert option in shown
    assert "(default: 256)" in shown


def test_bad_sampling_is_refused(checkpoint, capsys):
    assert main(["generate", "--checkpoint", str(checkpoint), "--prompt", "a", "--top-p", "2"]) == 2
    err = capsys.readouterr().err
    assert "top_p = 2.0" in err and err.startswith("error: ") and err.count("\n") == 1


def test_generation_config_gives_the_defaults(checkpoint, engine, tmp_path):
    folder = shutil.copytree(checkpoint, tmp_path / "model")
    (folder / "generation_config.json").write_text(json.dumps({"temperature": 0.7, "top_p": 0.9, "do_sample": True}))
    args = ("generate", "--checkpoint", folder, "--prompt", PROMPT, "--max-new-tokens", "8", "--json", "--seed", "3")
    done = run(*args, "--top-p", "0.5", "--logit-bias", "5", "1.5")
    assert done.returncode == 0, done.stderr
    sampling = infer.Sampling(temperature=0.7, top_p=0.5, seed=3, logit_bias=((5, 1.5),))
    report = json.loads(done.stdout)
    assert tuple(report["tokens"]) == engine.generate(PROMPT, max_new_tokens=8, sampling=sampling).result.tokens
    assert "sampling by default: temperature 0.7 (generation_config.json)" in done.stderr
    assert report["conditions"]["sampling"]["temperature"] == 0.7

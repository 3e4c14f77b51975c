"""The plan of --budget with substitutes for its commands: stages that a command runs, its record, and the steps."""

import json
import time

import pytest
import tyro

from laneformer.commands import tokenize
from laneformer.commands.lab.gpu_check.pretraining import GPU, RECORD, Progress, corpus_folders, follow, plan, steps_of
from laneformer.commands.lab.gpu_check.stage import PYTHON, Outcome, Stage
from laneformer.commands.lab.gpu_check.training_report import pretraining_page, training_table
from laneformer.errors import ConfigError, InputError
from laneformer.infer.commands import bench, generate, humaneval
from laneformer.train import bench as train_bench
from laneformer.train.recipes import parse

# A stage that waits for SIGTERM and then writes a file. If the file exists, the stage passes without waiting.
WAITS = """
import pathlib, signal, sys, time
path = pathlib.Path(r"{out}") / "saved"
print("resumes" if path.exists() else "starts", flush=True)
stopped = [path.exists()]
signal.signal(signal.SIGTERM, lambda *_: stopped.append(True))
while not any(stopped):
    time.sleep(0.05)
path.write_text("")
sys.exit(143 if len(stopped) > 1 else 0)
"""


def python(name, seconds, code, **options):
    return Stage(name, seconds, ((PYTHON, "-c", code),), {}, **options)


def run(out, stages, seconds):
    progress = Progress.open(out, {"budget": 100})
    done = follow(stages, progress, {"out": out}, seconds, {}, lambda outcome: None)
    return done, {outcome.stage: outcome.status for outcome in Progress.open(out, {"budget": 100}).all}


def test_resuming_stage_runs_over_several_commands(tmp_path, monkeypatch):
    monkeypatch.setattr("laneformer.commands.lab.gpu_check.pretraining.RESERVE", 0)
    monkeypatch.setattr("laneformer.commands.lab.gpu_check.pretraining.LEAST", 0)
    stages = [python("waits", 60, WAITS, resumes=True), python("after", 5, "open(r'{out}/after', 'w')")]
    assert run(tmp_path, stages, 3) == (False, {"waits": "unfinished"})
    assert (tmp_path / "saved").exists() and not (tmp_path / "after").exists()
    assert run(tmp_path, stages, 60) == (True, {"waits": "passed", "after": "passed"})
    assert (tmp_path / "waits.log").read_text() == "starts\nresumes\n"
    (tmp_path / "after").unlink()
    assert run(tmp_path, stages, 60)[0] and not (tmp_path / "after").exists(), "a passed stage does not run again"


def test_next_stage_runs_after_a_stage_used_its_time(tmp_path):
    stages = [python("waits", 1, WAITS, resumes=True), python("after", 5, "pass")]
    assert run(tmp_path, stages, 60) == (True, {"waits": "unfinished", "after": "passed"})


def test_stage_without_resume_waits_for_a_command_with_enough_time(tmp_path):
    stages = [python("short", 5, "pass"), python("long", 40, "pass")]
    assert run(tmp_path, stages, 30) == (False, {"short": "passed"})
    second = run(tmp_path, stages, 30)
    assert second == (True, {"short": "passed", "long": "passed"}), "the first stage of a command may get less time"


def test_only_failed_training_ends_the_plan(tmp_path):
    stages = [python(name, 20, "raise SystemExit(1)") for name in ("humaneval", "corpus", "speed")]
    assert run(tmp_path, stages, 60) == (True, {"humaneval": "failed", "corpus": "failed"})
    stages[1] = python("corpus", 20, "pass")
    assert run(tmp_path, stages, 60)[1]["corpus"] == "passed", "a failed stage runs again"
    (tmp_path / "late").mkdir()
    late = python("pace", 1, "import time; time.sleep(60)")
    assert run(tmp_path / "late", [late], 60) == (True, {"pace": "out of time"})
    assert run(tmp_path / "late", [python("pace", 20, "pass")], 60) == (True, {"pace": "passed"})


def test_stopped_command_counts_the_time_of_its_stage(tmp_path, monkeypatch):
    def stopped(*_):
        time.sleep(0.2)
        raise KeyboardInterrupt

    monkeypatch.setattr("laneformer.commands.lab.gpu_check.pretraining.run", stopped)
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path, [python("waits", 60, WAITS, resumes=True)], 60)
    progress = Progress.open(tmp_path, {"budget": 100})
    assert progress.outcomes["waits"]["status"] == "unfinished" and progress.spent("waits") >= 0.2


def test_steps_fill_the_time_and_are_measured_once(tmp_path):
    pace = tmp_path / "pace.json"
    pace.write_text(json.dumps({"entries": [{"step_seconds": {"all": [[0.5, 0.4, 9.0], [0.5, 0.5]]}}]}))
    words = steps_of(pace, 1500)
    assert words == {"steps": 2700, "warmup": 135, "every": 240}
    progress = Progress({"budget": 1})
    progress.words = words
    progress.add(Outcome("pace", "passed", 3.0))
    progress.save(tmp_path)
    assert Progress.open(tmp_path, {"budget": 1}) == progress
    pace.write_text("{")
    with pytest.raises(InputError, match="no measured steps"):
        steps_of(pace, 1500)


def test_another_plan_and_a_damaged_record_are_refused(tmp_path):
    Progress({"budget": 2400, "humaneval": "a"}).save(tmp_path)
    with pytest.raises(ConfigError, match="--budget 2400, not 1700"):
        Progress.open(tmp_path, {"budget": 1700, "humaneval": "a"})
    for damaged in ("{", "[]", '{"budget": 1}'):
        (tmp_path / RECORD).write_text(damaged)
        with pytest.raises(InputError, match="damaged"):
            Progress.open(tmp_path, {"budget": 2400})


def test_plan_has_valid_options(tmp_path):
    stages = {stage.name: stage.commands[0] for stage in plan(GPU, 2400, ["a", "b"], tmp_path / "h.jsonl", "auto")}
    assert [*stages] == ["corpus", "pace", "pretrain", "humaneval", "speed", "sample"]
    corpus = tyro.cli(tokenize.Options, args=stages["corpus"][3:], config=(tyro.conf.FlagCreatePairsOff,))
    corpus.check()
    (entry,) = train_bench.entries(tyro.cli(train_bench.Bench, args=stages["pace"][3:]))
    words = {"{steps}": "800", "{warmup}": "40", "{every}": "80"}
    trained = parse([words.get(word, word) for word in stages["pretrain"][3:]])
    assert trained.steps == 800 and trained.data.batch_size == entry.config.data.batch_size
    assert trained.optimizer.warmup_steps == 40 and trained.save_every == trained.validate_every == 80
    assert corpus.train_bpe <= trained.model.vocab_size and trained.data.path[0] == corpus.out
    whole = parse(["laneformer_120m"])
    assert trained.data.batch_size // trained.accumulate == whole.data.batch_size // whole.accumulate
    humaneval.check(tyro.cli(humaneval.Options, args=stages["humaneval"][4:]))
    measured = tyro.cli(bench.Options, args=stages["speed"][4:])
    assert bench.backends(measured) == ["cuda", "xla"] and measured.output_tokens + 65 <= 4096
    assert tyro.cli(generate.Options, args=stages["sample"][4:]).prompt == "def fibonacci(n):"


def test_stages_share_the_budget_and_scores_need_a_file():
    stages = plan(GPU, 2400, ["a"], None, "auto")
    assert sum(stage.seconds for stage in stages) == 2400
    assert {stage.name: stage.seconds for stage in stages}["pretrain"] == 1500
    assert next(stage for stage in stages if stage.name == "humaneval").lacks == "no --humaneval FILE"


def test_corpus_is_the_standard_library_and_installed_packages():
    assert any(folder.endswith("site-packages") for folder in corpus_folders())
    assert len(set(corpus_folders())) == len(corpus_folders())


def test_report_ignores_truncated_files(tmp_path):
    (tmp_path / "run").mkdir()
    (tmp_path / "train-0.json").write_text('{"entries": [')
    assert training_table(tmp_path) == [] and pretraining_page(tmp_path) == []
    steps = [{"step": n, "loss": 5.0 - n, "tokens": 8 * n, "tokens_per_second": 10.0 * n} for n in (1, 2, 3)]
    lines = [*map(json.dumps, steps), json.dumps({"step": 2, "validation": {"a": {"loss": 4.5, "bits_per_byte": 1.5}}})]
    (tmp_path / "run" / "metrics.jsonl").write_text("\n".join(lines) + '\n{"step": 4, "lo')
    text = "\n".join(pretraining_page(tmp_path))
    assert "3 of 3 steps, 24 tokens" in text and "20 tokens/s" in text
    assert "| 2 | 16 | 3.0000 | 4.5000 | 1.5000 |" in text and "| 1 | 8 | 4.0000 |  |  |" in text

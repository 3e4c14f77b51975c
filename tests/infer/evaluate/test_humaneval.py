"""The whole way from problems to a report, with engines that write given texts."""

import dataclasses
import json
import types

import pytest

import laneformer
from laneformer.errors import ConfigError, InputError
from laneformer.infer import Engine, Sampling
from laneformer.infer.evaluate.answers import PREFILL
from laneformer.infer.evaluate.humaneval import Report, evaluate, generate, score
from laneformer.infer.evaluate.problems import load_problems
from laneformer.infer.evaluate.sample_files import Sample, SampleFile, VerdictFile, read_samples
from laneformer.infer.evaluate.scoring import Judge
from laneformer.infer.sandbox.sandbox import HarnessError, Outcome
from tests.support.evaluation_cases import ADD, TWICE, write_jsonl

RIGHT, WRONG = (
    {"add": "    return a + b\n", "twice": "    return text + text\n"},
    {"add": "    return a\n", "twice": "    return 3\n"},
)


class Scripted:
    """An engine that looks up its answer by the function that the prompt ends with. Its tokens are characters."""

    def __init__(self, answers, context=1000):
        self.answers, self.asked, self.warm = answers, [], []
        self.tokenizer = types.SimpleNamespace(encode=lambda text: [ord(character) for character in text])
        self.config = types.SimpleNamespace(eos_token_id=(0,), max_position_embeddings=context)
        self.conditions, self.heals = {"model": "scripted", "device": "none"}, True

    def warmup(self, prompt_tokens, max_new_tokens):
        self.warm.append(prompt_tokens)

    def generate(self, prompt, *, max_new_tokens, sampling, stop_tokens, stop_strings, channels, token_healing):
        prompt, self.healed = prompt if isinstance(prompt, str) else "".join(map(chr, prompt)), token_healing
        self.asked.append((prompt, sampling, stop_strings))
        self.stop_tokens, self.channels = stop_tokens, channels
        text = next(
            answer(sampling) if callable(answer) else answer
            for name, answer in self.answers.items()
            if f"def {name}(" in prompt
        )
        result = types.SimpleNamespace(
            text=text, finish_reason="stop", tokens=tuple(text), total_time=0.5, time_per_token=0.01
        )
        return types.SimpleNamespace(result=result)


@pytest.fixture(scope="module")
def problems(tmp_path_factory):
    return load_problems(write_jsonl(tmp_path_factory.mktemp("d") / "he.jsonl", [ADD, TWICE]))


@pytest.fixture(scope="module")
def judge():
    with Judge("rlimits") as made:  # no isolation: the programs here are our own
        yield made


def test_report_is_complete(problems, judge):
    engine = Scripted({"add": RIGHT["add"], "twice": WRONG["twice"]})
    report = evaluate(engine, problems, max_new_tokens=50, judge=judge)
    assert [(v.task_id, v.passed) for v in report.verdicts] == [("HumanEval/0", True), ("HumanEval/1", False)]
    assert report.pass_at == {1: 0.5} and report.interval[0] < 0.5 < report.interval[1]
    assert engine.asked[0][0] == ADD["prompt"].strip() + "\n" and "\ndef " in engine.asked[0][2]
    found = json.loads(json.dumps(report.as_json()))
    assert (found["passed"], found["total"], found["pass@1"], found["problems_without_samples"]) == (1, 2, 0.5, 0)
    assert found["sandbox"]["level"] == "rlimits" and found["sandbox"]["network"] is True
    assert found["verdicts"][1] | {"cpu_seconds": 0} == {
        "task_id": "HumanEval/1",
        "sample": 0,
        "passed": False,
        "verdict": "failed",
        "error": "AssertionError: ",
        "cpu_seconds": 0,
        "as_written": "failed",
        "tokens": len(WRONG["twice"]),
        "generation_seconds": 0.5,
    }
    made = found["generation"]
    assert made["mode"] == "completion" and made["max_new_tokens"] == 50 and made["conditions"]["model"] == "scripted"
    tokens = len(RIGHT["add"]) + len(WRONG["twice"])
    assert (
        made["tokens"] == tokens
        and made["tokens_per_second"] == tokens
        and made["decode_tokens_per_second_median"] == 100
    )
    assert "1/2 passed, pass@1 50.0 %" in report.summary and "tokens/s" in report.summary


def test_samples_have_different_seeds(problems, judge):
    engine = Scripted({"add": lambda s: RIGHT["add"] if s.seed % 2 else WRONG["add"], "twice": RIGHT["twice"]})
    sampling = Sampling(temperature=0.8, top_p=0.9, seed=5)
    report = evaluate(engine, problems, max_new_tokens=50, samples=10, sampling=sampling, judge=judge)
    seeds = [asked.seed for _, asked, _ in engine.asked]
    assert len(set(seeds)) == 20 and all(
        asked == dataclasses.replace(sampling, seed=asked.seed) for _, asked, _ in engine.asked
    )
    passed = sum(seed % 2 for seed in seeds[:10])
    assert report.counts == {"HumanEval/0": (10, passed), "HumanEval/1": (10, 10)}
    assert report.pass_at[1] == pytest.approx((passed / 10 + 1) / 2) and set(report.pass_at) == {1, 10}
    again = list(
        generate(Scripted(RIGHT), problems, max_new_tokens=50, samples=10, sampling=sampling, done={"HumanEval/0": 9})
    )
    assert len(again) == 11
    later = Scripted(RIGHT)
    list(generate(later, problems, max_new_tokens=50, samples=10, sampling=sampling, done={"HumanEval/0": 9}))
    assert [asked.seed for _, asked, _ in later.asked] == seeds[9:]  # the same seeds, wherever it begins
    other = Scripted(RIGHT)
    list(generate(other, problems, max_new_tokens=50, samples=10, sampling=dataclasses.replace(sampling, seed=6)))
    assert not {asked.seed for _, asked, _ in other.asked} & set(seeds)


def test_too_long_prompts_fail_and_are_reported(problems, judge):
    engine = Scripted(RIGHT, context=len(TWICE["prompt"].strip()) + 30)
    report = evaluate(engine, problems, max_new_tokens=50, judge=judge)
    assert [v.passed for v in report.verdicts] == [False, True] and len(engine.asked) == 1
    assert "1 prompts did not fit the context" in report.summary
    assert report.as_json()["generation"]["finish_reasons"] == {"prompt too long": 1, "stop": 1}


def test_chat_mode_uses_the_template(problems, judge):
    class Template:
        sha256 = "0" * 64

        def ends(self, eos):
            return (*eos, 1000)

        def channels(self, prompt):
            return ("channels of", len(prompt))

        def encode(self, messages, add_generation_prompt, opening):
            assert add_generation_prompt and messages[0]["role"] == "user" and not opening
            return [ord(character) for character in messages[0]["content"]]

    engine = Scripted({"add": "Here:\n```python\ndef add(a, b):\n    return a + b\n```\n", "twice": "no idea"})
    report = evaluate(engine, problems, max_new_tokens=50, judge=judge, chat=Template())
    assert [v.passed for v in report.verdicts] == [True, False]
    assert "self-contained Python script" in engine.asked[0][0] and engine.asked[0][2] == ()
    assert engine.stop_tokens == (0, 1000), "the end of a turn must end an answer"
    assert engine.channels == ("channels of", len(engine.asked[-1][0]))
    assert report.settings["mode"] == "chat" and report.settings["template_sha256"] == "0" * 64


def test_both_scores_are_reported(problems, judge):
    """A program whose own assertion is wrong passes when it is sanitized; the sandbox runs equal programs once."""
    engine = Scripted({"add": RIGHT["add"] + "\nassert add(1, 1) == 3\n", "twice": RIGHT["twice"]})
    report = evaluate(engine, problems, max_new_tokens=50, judge=judge)
    found = report.as_json()
    assert (found["form"], found["passed"], found["as_written"]) == ("sanitized", 2, {"passed": 1, "pass@1": 0.5})
    assert [verdict["as_written"] for verdict in found["verdicts"]] == ["failed", "passed"]
    assert "scored: sanitized programs; as written 1/2 pass" in report.summary
    ran = []
    outcomes = judge.outcomes
    judge.outcomes = lambda programs, progress: ran.extend(programs) or outcomes(programs, progress)
    try:
        score(report.samples, problems, judge)
    finally:
        del judge.outcomes
    assert len(ran) == 3, "the second program is the same in both forms"


def test_most_samples_empty_is_a_warning(problems, judge):
    engine = Scripted({"add": " \n", "twice": ""})
    healed = evaluate(engine, problems, max_new_tokens=50, judge=judge)
    assert engine.healed and healed.settings["token_healing"] and healed.as_json()["empty_samples"] == 2
    assert "warning: 2 of 2 samples are empty; use --mode chat" in healed.summary
    plain = evaluate(engine, problems, max_new_tokens=50, judge=judge, token_healing=False)
    assert not engine.healed and "2 of 2 samples are empty; leave --no-token-healing out" in plain.summary
    engine.heals = False
    evaluate(engine, problems, max_new_tokens=50, judge=judge)
    assert not engine.healed
    some = evaluate(Scripted({"add": "", "twice": RIGHT["twice"]}), problems, max_new_tokens=50, judge=judge)
    assert "warning" not in some.summary


def test_prefilled_chat_answers_continue_the_code_block(problems, judge):
    class Template:
        sha256 = "0" * 64

        def ends(self, eos):
            return eos

        def channels(self, prompt):
            return None

        def encode(self, messages, add_generation_prompt, opening=""):
            return [ord(character) for character in messages[0]["content"] + "<answer>" + opening]

    engine = Scripted({"add": "def add(a, b):\n    return a + b", "twice": "def twice(s):\n    return 2 * s\n```\nSo."})
    report = evaluate(engine, problems, max_new_tokens=50, judge=judge, chat=Template(), prefill=True)
    assert [v.passed for v in report.verdicts] == [True, True]
    assert engine.asked[0][0].endswith("<answer>" + PREFILL) and PREFILL.endswith(":\n```python\n")
    assert engine.asked[0][2] == ("\n```\n",) and report.settings["answer_start"] == PREFILL
    assert not engine.healed


def test_request_sizes_are_warmed_up_first(problems):
    engine = Scripted(RIGHT)
    list(generate(engine, problems, max_new_tokens=4, samples=3, sampling=Sampling(temperature=1.0)))
    lengths = [len(ADD["prompt"].strip()) + 1, len(TWICE["prompt"].strip()) + 1]
    assert engine.warm == lengths and len({(n - 1).bit_length() for n in lengths}) == 2


def test_real_model_is_scored(problems, judge):
    """Runs a model with random weights, whose answers all fail."""
    config = laneformer.ModelConfig(
        vocab_size=128,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        num_lanes=1,
        max_position_embeddings=256,
    )
    tokenizer = types.SimpleNamespace(
        encode=lambda text: list(text.encode()), token_bytes=lambda token, first=False: bytes([token])
    )
    model = laneformer.Laneformer.init(config, 1)
    report = evaluate(model, problems.first(1), max_new_tokens=8, tokenizer=tokenizer, judge=judge)
    assert len(report.verdicts) == 1 and report.pass_at[1] == 0 and report.speed["tokens"] == 8
    assert report.settings["conditions"]["backend"] in ("xla", "cpu", "cuda", "hip")
    with pytest.raises(InputError, match=r"needs a tokenizer\.json"):
        evaluate(Engine(model), problems, max_new_tokens=8, judge=judge)


def test_bad_requests_are_refused(problems, judge):
    with pytest.raises(ConfigError, match=r"2 samples .*--temperature"):
        evaluate(Scripted(RIGHT), problems, max_new_tokens=5, samples=2, judge=judge)
    with pytest.raises(ConfigError, match="samples must be at least 1, got 0"):
        evaluate(Scripted(RIGHT), problems, max_new_tokens=5, samples=0, judge=judge)


def test_failed_references_prevent_generation(tmp_path, judge):
    broken = load_problems(write_jsonl(tmp_path / "he.jsonl", [{**ADD, "canonical_solution": "    return 0\n"}]))
    engine = Scripted(RIGHT)
    with pytest.raises(HarnessError, match="reference solutions fail"):
        evaluate(engine, broken, max_new_tokens=5, judge=judge)
    assert not engine.asked


# ---- files


def test_both_forms_of_samples_are_read(tmp_path, problems, judge):
    rows = [
        {"task_id": "HumanEval/0", "completion": RIGHT["add"]},
        {"task_id": "HumanEval/1", "solution": "def twice(s): return 2 * s"},
    ]
    samples = read_samples(write_jsonl(tmp_path / "s.jsonl", rows), problems)
    report = score(samples, problems, judge)
    assert report.pass_at == {1: 1.0} and report.as_json()["generation"] is None and report.speed is None
    # Our samples have both fields, with the same program, so that other evaluation tools can read them.
    for sample in generate(Scripted(RIGHT), problems, max_new_tokens=50):
        assert sample.solution == problems[sample.task_id].prompt + sample.completion


def test_raw_answers_are_read(tmp_path, problems, judge):
    """As text of the forms completion and chat; what is not the function does not count."""
    rows = [
        {"task_id": "HumanEval/0", "answer": RIGHT["add"] + "\n\nexit()\n", "form": "completion"},
        {"task_id": "HumanEval/0", "answer": "~~~\ndef add(a, b):\n    return a + b\ninput()\n~~~", "form": "chat"},
        {"task_id": "HumanEval/1", "answer": "<think>```def twice(s): return s```", "form": "chat"},
        {"task_id": "HumanEval/1", "solution": "Sure:\n```python\ndef twice(s):\n    return s * 2\n```\n"},
    ]
    report = score(read_samples(write_jsonl(tmp_path / "s.jsonl", rows), problems), problems, judge)
    assert [v.passed for v in report.verdicts] == [True, True, False, True]
    assert report.as_written["passed"] == 0
    assert report.samples[0].raw == rows[0]["answer"] and report.samples[0].completion == rows[0]["answer"]


def test_problems_without_samples_are_reported(tmp_path, problems, judge):
    path = write_jsonl(tmp_path / "s.jsonl", [{"task_id": "HumanEval/1", "completion": "    return 1"}])
    report = score(read_samples(path, problems), problems, judge)
    assert (report.as_json()["total"], report.as_json()["problems_without_samples"]) == (1, 1)
    assert "1 of 2 problems have no samples and are not counted" in report.summary


@pytest.mark.parametrize(
    "line, message",
    [
        ({"task_id": "HumanEval/9", "completion": ""}, "sample 1 .*'HumanEval/9'.* he.jsonl"),
        ({"completion": ""}, "sample 1 has no 'task_id'"),
        ({"task_id": "HumanEval/0"}, "sample 1 has no 'completion'"),
        ({"task_id": "HumanEval/0", "completion": 3}, "as text"),
        ({"task_id": "HumanEval/0", "solution": None}, "as text"),
        ({"task_id": ["a"], "solution": ""}, "as text"),
        ({"task_id": "HumanEval/0", "answer": ""}, "sample 1 has no 'form'"),
        ({"task_id": "HumanEval/0", "answer": "", "form": "prose"}, "form completion or chat"),
        ({"task_id": "HumanEval/0", "answer": 1, "form": "chat"}, "as text"),
    ],
)
def test_bad_sample_files_are_refused(tmp_path, problems, line, message):
    with pytest.raises(InputError, match=message):
        read_samples(write_jsonl(tmp_path / "s.jsonl", [line]), problems)
    with pytest.raises(InputError, match=r"s\.jsonl contains no samples"):
        read_samples(write_jsonl(tmp_path / "s.jsonl", []), problems)


def test_truncated_sample_file_is_resumed(tmp_path, problems):
    path, settings = tmp_path / "new" / "s.jsonl", {"max_new_tokens": 3, "stops": ("a",)}
    first = Sample(task_id="HumanEval/0", solution="x = 'ä\ud800'", completion="", n_tokens=1, seconds=0.5)
    with SampleFile(path, settings, problems) as file:
        file.add(first)
    whole = path.read_bytes()
    for cut in (b"", b'{"task_id": "HumanEval/1", "solu', whole[:-1]):
        path.write_bytes(whole + cut)
        with SampleFile(path, settings, problems) as file:
            assert file.samples == [first] and file.counts == {"HumanEval/0": 1}
        assert path.read_bytes() == whole
    with pytest.raises(ConfigError, match=r"other settings \(max_new_tokens\): name another file"):
        SampleFile(path, {**settings, "max_new_tokens": 4}, problems)
    path.with_suffix(".settings.json").unlink()
    with pytest.raises(ConfigError, match="other settings"):  # no samples are appended to a file from elsewhere
        SampleFile(path, settings, problems)
    assert path.read_bytes() == whole


def test_known_verdicts_are_reused(tmp_path, problems, judge):
    samples = [
        Sample(task_id="HumanEval/0", solution=problems["HumanEval/0"].reference),
        Sample(task_id="HumanEval/1", solution="1 / 0"),
    ]
    path, conditions = tmp_path / "v.jsonl", {"data": "d"}
    with VerdictFile(path, conditions) as verdicts:
        report = score(samples, problems, judge, verdicts=verdicts)
    assert [v.passed for v in report.verdicts] == [True, False]
    path.write_bytes(path.read_bytes() + b'{"prog')  # killed while writing
    with VerdictFile(path, conditions) as verdicts:
        assert len(verdicts.known) == 2
        known = {VerdictFile.key("HumanEval/0", samples[0].solution): Outcome("killed", "as the file says", None)}
        verdicts.known.update(known)
        again: Report = score(samples, problems, judge, verdicts=verdicts)
    assert again.verdicts[0].outcome.error == "as the file says" and again.verdicts[1] == report.verdicts[1]
    with VerdictFile(path, {"data": "other"}) as verdicts:  # other conditions: run all again
        assert not verdicts.known

"""The published data sets: reference solutions pass, wrong ones fail. The tests are skipped unless
LANEFORMER_EVALUATION_DATA names the folder with their files.
"""

import dataclasses
import gzip
import json
import os
from pathlib import Path

import pytest

from laneformer.infer.evaluate.humaneval import score
from laneformer.infer.evaluate.problems import load_problems
from laneformer.infer.evaluate.sample_files import Sample
from laneformer.infer.evaluate.scoring import Judge

FILES = {
    "HumanEval.jsonl.gz": ("HumanEval", 164),
    "HumanEvalPlus-OriginFmt.jsonl.gz": ("HumanEval+", 164),
    "mbpp_sanitized.json": ("MBPP", 427),
    "MbppPlus-OriginFmt.jsonl.gz": ("MBPP+", 378),
}
DATA = Path(os.environ.get("LANEFORMER_EVALUATION_DATA", "/nonexistent"))
pytestmark = pytest.mark.skipif(
    not DATA.is_dir(), reason="LANEFORMER_EVALUATION_DATA names no folder with the published files"
)


@pytest.mark.parametrize("file", FILES)
def test_published_files_are_read(file):
    problems = load_problems(DATA / file)
    assert (problems.kind, len(problems)) == FILES[file]
    for problem in problems:
        compile(problem.prompt, problem.task_id, "exec")  # a whole program may follow it


def test_mbpp_prompts_match_evalplus():
    with gzip.open(DATA / "MbppPlus.jsonl.gz", "rt") as file:
        theirs = {row["task_id"]: row for row in map(json.loads, file)}
    for problem in load_problems(DATA / "MbppPlus-OriginFmt.jsonl.gz"):
        assert (problem.prompt, problem.entry_point) == (
            theirs[problem.task_id]["prompt"],
            theirs[problem.task_id]["entry_point"],
        )


@pytest.mark.slow
@pytest.mark.parametrize("file", FILES)
def test_reference_solutions_pass_and_wrong_ones_fail(file):
    problems = load_problems(DATA / file)
    wrong = [
        Sample(
            task_id=problem.task_id,
            solution=f"{problem.prompt}\n\ndef {problem.entry_point}(*_, **__):\n    return object()\n",
        )
        for problem in problems
    ]
    with Judge() as judge:
        judge.verify(problems.problems)  # raises unless all pass
        report = score(wrong, problems, judge)
    passed = [verdict.task_id for verdict in report.verdicts if verdict.passed]
    assert passed == [] and len(report.verdicts) == FILES[file][1], dataclasses.asdict(report.verdicts[0])

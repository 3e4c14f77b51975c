"""Judging programs: first the reference solutions, then the samples in parallel; pass@k and its interval."""

import math
import os
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from typing import Any, Self

import numpy as np
from tqdm import tqdm

from laneformer.errors import ConfigError
from laneformer.infer.evaluate.problems import Problem
from laneformer.infer.sandbox.sandbox import HarnessError, Limits, Outcome, Sandbox

# A loop of known length measures the speed of a core. Time limits are for a core that runs it in LOOP_SECONDS, and grow
# in proportion on a slower core.
LOOP = "n = 0\nfor i in range(2_000_000):\n    n += i * i % 7\n"
LOOP_SECONDS = 0.15
REFERENCE_FACTOR = 4  # a program may always take at least this many times as long as the reference solution


class Judge:
    """Runs programs against their tests, for any number of scorings. `close` it, or use it in a `with` block."""

    def __init__(self, sandbox: str = "auto", workers: int | None = None):
        """sandbox: a level of infer.sandbox.sandbox.Sandbox. workers: number of programs that run at a time; by default
        one per core.

        Raises ConfigError if the sandbox does not work or `workers` exceeds the cores, HarnessError if the machine is
        too slow.
        """
        cores = len(os.sched_getaffinity(0))
        if workers is not None and not 1 <= workers <= cores:
            raise ConfigError(
                f"workers must be 1 to {cores}, the number of cores, got {workers}; more would slow each other down"
            )
        self.workers = workers or cores
        self.sandbox = Sandbox(sandbox)
        try:
            loops = [self.sandbox.run(LOOP, "", _limits(60)).cpu_seconds for _ in range(3)]
        except BaseException:
            self.close()
            raise
        seconds = [loop for loop in loops if loop is not None]
        if len(seconds) < len(loops):
            self.close()
            raise HarnessError(
                "a loop of 2,000,000 rounds takes more than a minute: reduce the load of this machine, then run the"
                " command again"
            )
        self.slowness = max(1.0, min(seconds) / LOOP_SECONDS)
        """Time of a program relative to that on a nominal core, at least 1."""
        self._references: dict[Problem, float] = {}

    @property
    def report(self) -> dict[str, Any]:
        """The facts that a verdict depends on, besides those of the sandbox."""
        limits = {name: value for name, value in asdict(_limits(0)).items() if not name.endswith("seconds")}
        return {**limits, "reference_factor": REFERENCE_FACTOR, "slowness": self.slowness, "workers": self.workers}

    def verify(self, problems: Sequence[Problem], progress: bool = False) -> None:
        """Runs the reference solutions that have not been run yet. Raises HarnessError if one fails, because no verdict
        would be meaningful then.
        """
        new = [problem for problem in problems if problem not in self._references]
        limits = [_limits(REFERENCE_FACTOR * problem.seconds * self.slowness) for problem in new]
        failed = []
        for n, outcome in self._run([(problem, problem.reference) for problem in new], limits, "references", progress):
            if outcome.verdict == "passed" and outcome.cpu_seconds is not None:
                self._references[new[n]] = outcome.cpu_seconds
            else:
                failed.append(f"{new[n].task_id} ({outcome.verdict}: {outcome.error})")
        if failed:
            raise HarnessError(
                f"{len(failed)} of {len(new)} reference solutions fail, so nothing is scored: check the sandbox, the"
                f" machine and the data file: {', '.join(failed[:5])}{', ...' if len(failed) > 5 else ''}"
            )

    def run(self, program: str, seconds: float, longest_error: int) -> Outcome:
        """Runs a program that tests itself. seconds: limit on its CPU time, on a machine of nominal speed. errors: as
        `Sandbox.run`.
        """
        return self.sandbox.run(program, "", _limits(seconds * self.slowness), longest_error=longest_error)

    def limits(self, problem: Problem) -> Limits:
        """The limits of a program for a problem whose reference solution was run."""
        return _limits(max(problem.seconds * self.slowness, REFERENCE_FACTOR * self._references[problem]))

    def outcomes(
        self, programs: Sequence[tuple[Problem, str]], progress: bool = False
    ) -> Iterator[tuple[int, Outcome]]:
        """Yields (index, outcome) of each program, in the order in which they end. The problems must be verified.
        Raises HarnessError if a program could not be run.
        """
        return self._run(programs, [self.limits(problem) for problem, _ in programs], "samples", progress)

    def _run(
        self, programs: Sequence[tuple[Problem, str]], limits: Sequence[Limits], what: str, progress: bool
    ) -> Iterator[tuple[int, Outcome]]:
        pool = ThreadPoolExecutor(self.workers)
        try:
            jobs = {
                pool.submit(
                    self.sandbox.run,
                    solution,
                    problem.test,
                    limit,
                    entry_point=problem.entry_point,
                    context=problem.context,
                ): n
                for n, ((problem, solution), limit) in enumerate(zip(programs, limits, strict=True))
            }
            for job in progress_bar(as_completed(jobs), what, len(jobs), "program", progress):
                yield jobs[job], job.result()
        finally:
            pool.shutdown(wait=False, cancel_futures=True)  # limits, or closing the sandbox, end running programs

    def close(self) -> None:
        """Kills running programs."""
        self.sandbox.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_) -> None:
        self.close()


def _limits(cpu_seconds: float) -> Limits:
    """Limits with this CPU time in seconds, and enough elapsed time for a shared core."""
    return Limits(cpu_seconds, wall_seconds=4 * cpu_seconds + 10)


def progress_bar(items: Iterable, what: str, total: int, unit: str, shown: bool) -> tqdm:
    """A progress bar on standard error. It is updated rarely if standard error is not a terminal."""
    return tqdm(
        items,
        what,
        total=total,
        unit=unit,
        disable=not shown or not total,
        mininterval=0.1 if sys.stderr.isatty() else 10,
    )


def pass_at_k(counts: Mapping[str, tuple[int, int]], k: int) -> float | None:
    """The unbiased estimate of the probability that at least one of k samples passes, averaged over problems; None if a
    problem has fewer than k samples.

    counts: task_id -> (samples n, passed c). The estimate is 1 - C(n - c, k) / C(n, k) (Chen et al., arXiv 2107.03374).
    """
    if any(n < k for n, _ in counts.values()):
        return None
    return float(np.mean([1 - math.comb(n - c, k) / math.comb(n, k) for n, c in counts.values()]))


def wilson(share: float, trials: int) -> tuple[float, float]:
    """The 95 % confidence interval of a share observed in `trials` trials (Wilson, JASA 22, 1927)."""
    z = 1.959963984540054
    middle = share + z * z / (2 * trials)
    half = z * math.sqrt(share * (1 - share) / trials + z * z / (4 * trials * trials))
    scale = 1 + z * z / trials
    return max(0.0, (middle - half) / scale), min(1.0, (middle + half) / scale)

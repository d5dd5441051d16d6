"""Two checkouts of cgshim, each in a process of its own, measured in turns: a round here, a round
there.

One process cannot import both. In turns each round has the other's within milliseconds of it, so
that a machine that grows slower grows slower for both.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks.measure import Medians

START = "import sys, benchmarks; sys.path[:0] = {paths}; from benchmarks.worker import main; main()"
"""The cases are this checkout's, whichever cgshim they measure."""


def measured_in_turns(
    checkouts: tuple[Path, Path], arguments: list[str], environment: dict[str, str]
) -> Iterator[tuple[int, Medians, Medians]]:
    """For each case what a worker measures of each checkout, or why one of them cannot; the
    arguments are the workers'.
    """
    hear_first, say_second = os.pipe()
    hear_second, say_first = os.pipe()
    first = _worker(
        checkouts[0], [*arguments, "--turns", "lead", str(hear_first), str(say_first)], environment
    )
    second = _worker(
        checkouts[1],
        [*arguments, "--turns", "follow", str(hear_second), str(say_second)],
        environment,
    )
    for end in (hear_first, say_first, hear_second, say_second):
        os.close(end)
    with first, second:
        for here, there in zip(_results(first), _results(second), strict=True):
            yield here[0], here[1], there[1]
    if first.returncode or second.returncode:
        raise SystemExit("the measurements failed")


def _worker(
    checkout: Path, arguments: list[str], environment: dict[str, str]
) -> subprocess.Popen[str]:
    start = START.format(paths=[str(checkout), str(checkout / "backends")])
    pipes = tuple(map(int, arguments[-2:]))
    command = [sys.executable, "-c", start, *arguments]
    return subprocess.Popen(
        command, env=environment, stdout=subprocess.PIPE, text=True, pass_fds=pipes
    )


def _results(worker: subprocess.Popen[str]) -> Iterator[Any]:
    assert worker.stdout is not None
    return map(json.loads, worker.stdout)


class Turns:
    """Rounds that wait for the other process's: the leader tells how many are left, the follower
    repeats it.
    """

    def __init__(self, role: str, hear: str, say: str) -> None:
        self._leads = role == "lead"
        self._heard, self._said = os.fdopen(int(hear)), os.fdopen(int(say), "w", buffering=1)

    def problem_of_either(self, own: str) -> str:
        """What keeps this process or the other from measuring the next case; "" if nothing does."""
        print(" ".join(own.split()), file=self._said)
        other = self._heard.readline().strip()
        return own or other

    def __call__(self, rounds: int) -> Iterator[int]:
        return self._lead(rounds) if self._leads else self._follow()

    def _lead(self, rounds: int) -> Iterator[int]:
        for left in reversed(range(rounds)):
            self._heard.readline()  # the first word says that the follower is ready
            yield left
            print(left, file=self._said)
        self._heard.readline()

    def _follow(self) -> Iterator[int]:
        left = 1
        print("ready", file=self._said)
        while left:
            left = int(self._heard.readline())
            yield left
            print(left, file=self._said)

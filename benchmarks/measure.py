"""Measures several spellings of one thing against each other: their times, or the memory that they
need.

The timer is timeit's, in rounds of our own: a ratio on a noisy machine needs its two sides within
milliseconds of each other, and pytest-benchmark runs one side to its end before the other, pyperf
even in other processes.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from timeit import Timer
from typing import Any

SECONDS_OF_A_SAMPLE = 0.0005  # short beside a time slice of the operating system
ROUNDS_AT_LEAST = 7

Sides = Mapping[str, Callable[[], Any]]
Medians = dict[str, dict[str, float]]
"""for each side its median, and the median over the rounds of its ratio to the base in the same round"""
Rounds = Callable[[int], Iterable[int]]
"""goes through as many rounds; `range`, unless another process measures in turns with this one"""


def times(sides: Sides, base: str, seconds: float, in_rounds: Rounds = range) -> Medians:
    """In seconds a call."""
    timers = {name: Timer(side, "import gc; gc.enable()") for name, side in sides.items()}
    once = max(min(timer.repeat(5, 1)) for timer in timers.values())
    number = max(1, round(SECONDS_OF_A_SAMPLE / once))
    rounds = max(ROUNDS_AT_LEAST, round(seconds / (once * number * len(timers))))
    samplers = {name: lambda t=timer: t.timeit(number) / number for name, timer in timers.items()}
    return _medians(samplers, base, in_rounds(rounds))


def peaks(sides: Sides, base: str, in_rounds: Rounds = range) -> Medians:
    """In bytes by which a call raises the peak of this process; Linux alone tells, and can forget
    an old peak.
    """
    samplers = {name: lambda s=side: _peak(s) for name, side in sides.items()}
    return _medians(samplers, base, in_rounds(ROUNDS_AT_LEAST))


def _peak(side: Callable[[], Any]) -> int:
    Path("/proc/self/clear_refs").write_text("5")
    before = _high_water_mark()
    side()
    return _high_water_mark() - before


def _high_water_mark() -> int:
    status = Path("/proc/self/status").read_text()
    return 1024 * int(status.partition("VmHWM:")[2].split()[0])


def _medians(
    samplers: Mapping[str, Callable[[], float]], base: str, rounds: Iterable[int]
) -> Medians:
    samples: dict[str, list[float]] = {name: [] for name in samplers}
    for at in rounds:
        for name in list(samplers) if at % 2 else reversed(samplers):
            samples[name].append(samplers[name]())
    return {
        name: {
            "median": statistics.median(own),
            "ratio": statistics.median(_ratios(own, samples[base])),
        }
        for name, own in samples.items()
    }


def _ratios(own: Sequence[float], of: Sequence[float]) -> list[float]:
    return [a / b for a, b in zip(own, of, strict=True)]

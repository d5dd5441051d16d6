"""Where no GPU is, the tests that need one are counted, and none passes for one that has run."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

HIDDEN = {"CUDA_VISIBLE_DEVICES": "", "JAX_PLATFORMS": "cpu"}
WORKERS = {"jax": "1"}  # in a process of its own, and in the one that counts


def test_tests_that_need_a_gpu_are_counted(backend: str) -> None:
    workers = WORKERS.get(backend, "0")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-m",
        "gpu",
        "-n",
        workers,
        "-p",
        "no:cacheprovider",
        "tests/gpu",
    ]
    run = subprocess.run(
        [*command, "--backend", backend],
        env={**os.environ, **HIDDEN},
        capture_output=True,
        text=True,
    )
    has_some = backend in ("jax", "torch")
    assert run.returncode == pytest.ExitCode.NO_TESTS_COLLECTED, run.stdout + run.stderr
    assert ("\nnot run: " in run.stdout) == has_some
    assert (
        " gpu tests, no GPU here (`nox -s gpu` runs them where one is)" in run.stdout
    ) == has_some

"""Compares POT with itself, with the adapter in the place of its own gradients.

`python examples/adopted/pot/run.py FOLDER` unpacks POT's sdist there and runs the tests in it of
all functions that call `set_gradients`, on all its backends; then losses with an upstream
gradient other than 1, which its tests do not have.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import jax
import numpy as np
import ot
import tensorflow as tf
import torch

sys.path.insert(0, str(Path(__file__).parents[1]))
from adapter import install
from comparison import compare, print_lines, print_ratios
from own_tests import compare_tests

tf.experimental.numpy.experimental_enable_numpy_behavior()
jax.config.update("jax_enable_x64", True)
TESTS = ["backend", "coot", "dmmot", "gnn", "optim", "ot", "partial", "solvers", "ucoot"]
CONFTEST = '''
"""The fixture that POT's tests take and its sdist leaves out: each backend, by name."""
import functools

import pytest
from jax import config
from ot.backend import get_backend, get_backend_list
from tensorflow.experimental.numpy import experimental_enable_numpy_behavior

config.update("jax_enable_x64", True)
experimental_enable_numpy_behavior()


@pytest.fixture(params=get_backend_list(), ids=str)
def nx(request):
    yield request.param


def skip_backend(name, reason="it has no such function"):
    def decorator(test):
        @functools.wraps(test)
        def skipping(*args, **fixtures):
            if str(fixtures["nx"]) == name:
                pytest.skip(reason)
            return test(*args, **fixtures)
        return skipping
    return decorator


def pytest_configure(config):
    pytest.skip_backend = skip_backend
'''
MASSES, RANDOM = np.array([0.2, 0.5, 0.3]), np.random.default_rng(5)
COSTS = RANDOM.uniform(1.0, 3.0, (3, 3))


def loss(costs, convert):
    masses = convert(MASSES), convert(MASSES[::-1].copy())
    return 3.0 * ot.emd2(*masses, costs) + 1.0


def in_torch():
    costs = torch.tensor(COSTS, requires_grad=True)
    loss(costs, torch.tensor).backward()
    return [costs.grad]


def in_jax():
    return [jax.grad(lambda costs: loss(costs, jax.numpy.asarray))(jax.numpy.asarray(COSTS))]


def in_tensorflow():
    costs = tf.constant(COSTS)
    with tf.GradientTape() as tape:
        tape.watch(costs)
        value = loss(costs, tf.constant)
    return [tape.gradient(value, costs)]


def constant_in_jax():
    """Gradients that do not depend on the inputs, of a value of another formula."""
    gradients = jax.numpy.asarray(COSTS), jax.numpy.asarray(MASSES)
    nx = ot.backend.get_backend(*gradients)
    fn = lambda *inputs: 3.0 * nx.set_gradients(jax.numpy.asarray(7.0), inputs, gradients)
    return jax.grad(fn, (0, 1))(*(2 * x for x in gradients))


CASES = {
    "3 emd2 + 1, torch": in_torch, "3 emd2 + 1, jax": in_jax, "3 emd2 + 1, tensorflow": in_tensorflow,
    "a constant gradient, jax": constant_in_jax,
}  # fmt: skip
PLAN = 3.0 * ot.emd(MASSES, MASSES[::-1].copy(), COSTS)
EXPECTED = {
    **{name: lambda: [PLAN] for name in CASES if "emd2" in name},
    "a constant gradient, jax": lambda: [3.0 * COSTS, 3.0 * MASSES],
}


def main(folder):
    kinds = [getattr(ot.backend, f"{name}Backend") for name in ("Torch", "Jax", "Tensorflow")]
    own = {kind: kind.set_gradients for kind in kinds}

    def uninstall():
        for kind, function in own.items():
            kind.set_gradients = function

    failed = compare(CASES, EXPECTED, install, uninstall)
    timed = "3 emd2 + 1, torch", "3 emd2 + 1, tensorflow"
    print_ratios({name: CASES[name] for name in timed}, install, uninstall)
    theirs = [*own.values(), ot.backend.TorchBackend().ValFunction]
    adapter = Path(__file__).with_name("adapter.py")
    print_lines(theirs, adapter)
    (sdist,) = download_sdist(folder).glob("*/test")
    with tempfile.TemporaryDirectory() as copy:
        tests = Path(shutil.copytree(sdist, Path(copy, "test")))
        (tests / "conftest.py").write_text(CONFTEST)
        files = [f"test_{name}.py" for name in TESTS if (tests / f"test_{name}.py").exists()]
        return failed + compare_tests(files, tests, adapter)


def download_sdist(folder):
    """Return the folder with POT's sdist unpacked: its wheel has no tests."""
    requirement = f"pot=={ot.__version__}"
    options = ["-q", "--no-deps", "--no-binary=pot", "-d", folder]
    subprocess.run([sys.executable, "-m", "pip", "download", *options, requirement], check=True)
    (archive,) = Path(folder).glob("*.tar.gz")
    shutil.unpack_archive(archive, folder, filter="data")
    return Path(folder)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))

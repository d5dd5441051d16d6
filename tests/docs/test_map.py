"""The map of one call in CONTRIBUTING.md, compared with a call."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

import cgshim
from cgshim import op_custom_gradient
from cgshim.testing.conformance import Framework

ROOT = Path(__file__).parents[2]
CONTRIBUTING = (ROOT / "CONTRIBUTING.md").read_text()
NAMES = {"numpy": "NumPy", "jax": "JAX", "torch": "PyTorch", "tensorflow": "TensorFlow"}


@pytest.fixture
def framework(backend: str) -> Framework:
    return Framework(backend)


@op_custom_gradient
def square(x: Any) -> Any:
    return x * x, lambda upstream: 3 * upstream * x


def functions_of_a_warm_call(framework: Framework) -> list[str]:
    """Return the names of the functions of cgshim, in the order of their first call."""
    found: dict[str, None] = {}
    folders = tuple(str(Path(module.__file__).parent) for module in (cgshim, framework.backend))

    def keep(frame: Any, event: str, argument: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_filename.startswith(folders):
            found.setdefault(code.co_qualname)

    x, upstream = framework.tensor(2.0), framework.tensor(7.0)

    def run() -> None:
        framework.check(square, x, upstream=upstream, output=4.0, gradients=(42.0,))

    run()
    sys.setprofile(keep)
    try:
        run()
    finally:
        sys.setprofile(None)
    return [*found]


@pytest.mark.skipif(sys.version_info < (3, 11), reason="co_qualname came with Python 3.11")
def test_the_map_agrees_with_a_warm_call(framework: Framework) -> None:
    functions = functions_of_a_warm_call(framework)
    (line,) = re.findall(rf"^- {NAMES[framework.name]}: ((?:.|\n  )+)", CONTRIBUTING, re.MULTILINE)
    named = re.findall("`([^`]+)`", line)
    assert len(named) > 4
    positions = [functions.index(name) for name in named]
    assert positions == sorted(positions)


def test_the_map_is_short() -> None:
    _, found, rest = CONTRIBUTING.partition("One call of an op, in order:\n")
    the_map, _, _ = rest.partition("\n`cgshim/host/`")
    assert found
    assert len(the_map.strip().splitlines()) <= 25

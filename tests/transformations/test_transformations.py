"""Every cell of the table of transformations: right, or refused in one sentence that names the op."""

import os

os.environ["XLA_FLAGS"] = (
    f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=4"
)

import cells
import numpy as np
import pytest

from cgshim import TransformationError

# Seen with torch 2.13 in November 2026, in torch itself: Dynamo makes a Function to stand for ctx;
# inductor imports.
pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning"),
]


def pytest_generate_tests(metafunc):
    if "cell" in metafunc.fixturenames:
        rows = [
            (f"{name}-{table}-{row}" if table else f"{name}-{row}", cell)
            for name in metafunc.config.option.backends
            for table, of_table in {"": cells.of_backend(name), **cells.on_host(name)}.items()
            for row, cell in of_table.items()
        ]
        metafunc.parametrize("cell", [cell for _, cell in rows], ids=[name for name, _ in rows])


def test_no_cell_is_wrong(cell):
    result = cells.run(cell)
    assert result.outcome in ("ok", "refused"), result.detail
    if result.outcome == "refused":
        assert result.detail.startswith(("cube: ", "the gradient of cube: "))


def refusing():
    raise TransformationError("cube: some reason")


@pytest.mark.parametrize(
    ("planted", "outcome"),
    [
        (lambda: (np.ones(2), np.ones(2)), "ok"),
        (lambda: (np.ones(2), np.zeros(2)), "wrong"),
        (lambda: (np.ones(2), np.ones(1)), "wrong"),
        (refusing, "refused"),
    ],
    ids=["ok", "wrong number", "wrong shape", "refused"],
)
def test_a_cell_can_fail(planted, outcome):
    assert cells.run(planted).outcome == outcome

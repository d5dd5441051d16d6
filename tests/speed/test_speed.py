"""What a compiler makes of an op is what it makes of the same op by hand: exactly, and so at no
cost in a run.
"""

import importlib
import subprocess
import sys

import pytest

COMPILERS = {"jax": "programs_jax", "tensorflow": "programs_tensorflow", "torch": "programs_torch"}


def pytest_generate_tests(metafunc):
    if "compiled" in metafunc.fixturenames:
        tested = [name for name in metafunc.config.option.backends if name in COMPILERS]
        modules = {name: importlib.import_module(COMPILERS[name]) for name in tested}
        rows = [(name, case, module) for name, module in modules.items() for case in module.CASES]
        metafunc.parametrize(
            ("compiled", "case"),
            [(module.compiled, module.CASES[case]) for _, case, module in rows],
            ids=[f"{name}-{case}" for name, case, _ in rows],
        )


def test_an_op_compiles_to_what_it_compiles_to_by_hand(compiled, case):
    use, op, by_hand, other = case
    of_op = compiled(use(op))
    assert of_op == compiled(use(by_hand))
    assert of_op != compiled(use(other)), "the comparison sees nothing"


@pytest.mark.parametrize(
    ("code", "imported"), [("import cgshim", "False"), ("import cgshim, numpy", "True")]
)
def test_import_leaves_numpy_alone(code, imported):
    """NumPy would take most of the time of `import cgshim`, and is there already when it is needed."""
    code += "; import sys; print('numpy' in sys.modules)"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == imported

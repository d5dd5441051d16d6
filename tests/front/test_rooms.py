"""The gradient's room stands alone: it passes its conformance cases where the other two are deleted.

The other rooms are functions on the host (`cgshim/host/`) and NumPy's functions (`cgshim/ops/`), with
their parts of each backend. A case that calls a function of theirs is not the gradient's. Nor is
one that asks the gradient for them: with `host_outputs`, or for a scalar gradient of a whole tensor
in `op_embed_gradient`. tests/front/test_structure.py shows that nothing else in it asks.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from gaps import gaps_of

import cgshim
from cgshim._registry import load

ALONE = """
import json, sys
import cgshim

class Elsewhere:
    '''A name of another room: a case may import it, and shows that it needs it when it calls it.'''

    called = []

    def __init__(self, name):
        self.name = name

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Elsewhere(f"{self.name}.{name}")

    def __call__(self, *args, **options):
        self.called.append(self.name)
        if self.is_running:
            raise NeedsAnotherRoom(self.name)
        return self  # a table of functions, or a decorator

    is_running = False

class NeedsAnotherRoom(BaseException):
    pass

def asker():
    frame = sys._getframe(2)
    while frame.f_globals["__name__"].startswith("importlib"):
        frame = frame.f_back
    return frame.f_globals["__name__"]

def name_of_cgshim(name, its_own=cgshim.__getattr__):
    try:
        return its_own(name)
    except (AttributeError, ModuleNotFoundError):
        if name.startswith("__") or not asker().startswith("cgshim.testing."):
            raise
        return Elsewhere(name)

cgshim.__getattr__ = name_of_cgshim
from cgshim.testing.conformance import cases
from cgshim.testing.conformance._registry import result_of

backend, gaps = sys.argv[1], json.loads(sys.argv[2])
files_of = {case.name: case.framework.backend.__file__ for case in cases(backend)}
Elsewhere.is_running, of_the_gradient = True, {}
own_gaps = {name: gaps[name] for name in set(files_of) & set(gaps)}
for case in cases(backend, gaps=own_gaps):
    Elsewhere.called.clear()
    result = result_of(case)
    needs_another_room = Elsewhere.called or result.reason.startswith(
        ("ModuleNotFoundError: No module named 'cgshim.host", "ModuleNotFoundError: No module named 'cgshim.ops")
    )
    if not needs_another_room:
        of_the_gradient[case.name] = [result.outcome, result.reason]
rooms = [name for name in sys.modules if name.startswith(("cgshim.host", "cgshim.ops"))]
files = [cgshim.__file__, *set(files_of.values())]
print(json.dumps([files, rooms, of_the_gradient]))
"""


@pytest.fixture
def gradient_alone(tmp_path: Path) -> Path:
    """A folder with cgshim and the NumPy backend, without their other rooms."""
    for package, rooms in {cgshim: ("host", "ops"), load("numpy"): ("_host*", "_ops*")}.items():
        source = Path(package.__file__).parent
        shutil.copytree(
            source, tmp_path / source.name, ignore=shutil.ignore_patterns(*rooms, "__pycache__")
        )
    return tmp_path


def run_alone(python, folder: Path):
    program = folder / "alone.py"
    program.write_text(ALONE)
    return python(str(program), "numpy", json.dumps(gaps_of("numpy")))


def test_the_gradient_passes_its_cases_without_the_other_rooms(
    python, gradient_alone: Path
) -> None:
    found = run_alone(python, gradient_alone)
    assert found.returncode == 0, found.stderr
    files, rooms, cases = json.loads(found.stdout.splitlines()[-1])
    assert all(Path(file).is_relative_to(gradient_alone) for file in files)
    assert rooms == []
    assert cases
    assert {name: how for name, how in cases.items() if how[0] not in ("passed", "gap")} == {}


def test_the_check_can_fail(python, gradient_alone: Path) -> None:
    with (gradient_alone / "cgshim" / "_rule.py").open("a") as file:
        file.write("\nimport cgshim.ops\n")
    found = run_alone(python, gradient_alone)
    assert found.returncode == 1
    assert "cgshim/_rule.py" in found.stderr

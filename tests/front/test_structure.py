"""The architecture: imports go one way, and cgshim.backend has at most 30 names."""

from __future__ import annotations

import ast
import re
from collections.abc import Container, Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

import cgshim
import cgshim.backend

ROOT = Path(cgshim.__file__).parent
FILES = sorted(ROOT.glob("*.py"))
OTHER_ROOMS = sorted([*(ROOT / "host").glob("*.py"), *(ROOT / "ops").glob("*.py")])
BACKENDS = sorted((Path(__file__).parents[2] / "backends").rglob("*.py"))
LOOKS = ("getattr", "hasattr")


def imported_by(file: Path) -> set[str]:
    """Return the modules of cgshim that a file imports anywhere: in functions, and for its types,
    too.
    """
    found = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module)
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return {name for name in found if name.partition(".")[0] == "cgshim"}


def in_order(graph: dict[str, set[str]]) -> list[str]:
    return list(TopologicalSorter(graph).static_order())


def test_no_file_imports_one_that_imports_it():
    modules = {
        f"cgshim.{file.stem}": file for file in FILES if file.stem not in ("__init__", "__main__")
    }
    graph = {name: imported_by(file) & set(modules) for name, file in modules.items()}
    order = in_order(graph)
    assert (
        order.index("cgshim._protocol")
        < order.index("cgshim._registry")
        < order.index("cgshim._dispatch")
    )
    assert order.index("cgshim._pytree") < order.index("cgshim._rule") < order.index("cgshim._call")
    assert order.index("cgshim._call") < order.index("cgshim._op")


def test_a_circle_would_be_seen(tmp_path):
    (tmp_path / "a.py").write_text("def f():\n    from cgshim.b import x\n")
    (tmp_path / "b.py").write_text(
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    import cgshim.a\n"
    )
    with pytest.raises(CycleError):
        in_order({f"cgshim.{name}": imported_by(tmp_path / f"{name}.py") for name in "ab"})


OF_OUR_OWN = {
    *("cgshim._axes", "cgshim._closure", "cgshim._dispatch", "cgshim._errors", "cgshim._op"),
    *("cgshim._pytree", "cgshim._rule"),
}


def test_the_protocol_has_at_most_30_names():
    names = [name for name in vars(cgshim.backend) if not name.startswith("_")]
    assert len(names) <= 30
    document = (Path(__file__).parents[2] / "docs" / "reference" / "backend.rst").read_text()
    assert not [name for name in names if not re.search(rf"\b{name}\b", document)]


@pytest.mark.parametrize("file", BACKENDS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_a_backend_imports_what_any_backend_may(file):
    """cgshim.backend and cgshim.host.backend; cgshim's own backends use some modules of the front
    end besides.
    """
    own = {name for name in imported_by(file) if name.startswith("cgshim._")}
    assert imported_by(file) - own <= {"cgshim.backend", "cgshim.host.backend"}
    assert own <= OF_OUR_OWN
    if "_host" not in (file.stem, file.parent.name):
        assert not needed_by(file, {"cgshim.host.backend"})


def test_the_host_is_seen_where_it_is_needed(tmp_path):
    file = tmp_path / "a.py"
    for code, expected in {
        "def f():\n    from cgshim.host.backend import Spec\n": {"cgshim.host.backend"},
        "if TYPE_CHECKING:\n    from cgshim.host.backend import Spec\n": set(),
    }.items():
        file.write_text(code)
        assert needed_by(file, {"cgshim.host.backend"}) == expected


@pytest.mark.parametrize("file", OTHER_ROOMS, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_the_other_rooms_import_no_other_room(file):
    own = f"cgshim.{file.parent.name}"
    others = {name for name in imported_by(file) if name != own and not name.startswith(f"{own}.")}
    assert {name for name in others if not name.startswith("cgshim._")} <= {"cgshim.backend"}


def modules_of(package: Path) -> dict[str, Path]:
    """Return the files of a package, by the names of their modules."""
    files = {
        file: file.relative_to(package.parent).with_suffix("").parts
        for file in package.rglob("*.py")
    }
    return {".".join(parts).removesuffix(".__init__"): file for file, parts in files.items()}


def run_by(node: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of a module without those that only its types need."""
    yield node
    typed = isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING"
    for child in node.orelse if typed else ast.iter_child_nodes(node):
        yield from run_by(child)


def needed_by(file: Path, modules: Container[str]) -> set[str]:
    """Return which modules a file imports when it runs, in functions and by their names, too."""
    found = set()
    for node in run_by(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{file} imports by dots"
            submodules = {
                name for alias in node.names if (name := f"{node.module}.{alias.name}") in modules
            }
            found |= submodules | ({node.module} if len(submodules) < len(node.names) else set())
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            found |= {node.value} if "." in node.value else set()
        elif isinstance(node, ast.JoinedStr):
            parts = [
                re.escape(part.value) if isinstance(part, ast.Constant) else r"\w+"
                for part in node.values
            ]
            found |= {
                name for name in modules if "." in parts[0] and re.fullmatch("".join(parts), name)
            }
    return {name for name in found if name in modules}


PACKAGES = [
    ROOT,
    *sorted(
        file.parent
        for file in BACKENDS
        if file.parents[1].name == "backends" and file.name == "__init__.py"
    ),
]


ROOMS = {"host", "ops", "_host", "_ops"}
JOINTS = {
    "cgshim/__init__.py": {"cgshim.host", "cgshim.ops"},
    "cgshim/_decorator.py": {"cgshim.host.backend"},
    "cgshim/_embed.py": {"cgshim.ops"},
    "cgshim_jax/__init__.py": {"cgshim_jax._host", "cgshim_jax._ops"},
    "cgshim_numpy/__init__.py": {"cgshim_numpy._ops"},
    "cgshim_tensorflow/__init__.py": {"cgshim_tensorflow._host", "cgshim_tensorflow._ops"},
    "cgshim_torch/__init__.py": {"cgshim_torch._host", "cgshim_torch._ops"},
}
"""where the gradient is joined with the rooms for functions on the host and for NumPy's functions"""


def test_gradients_import_host_and_ops_only_where_listed():
    modules = {name: file for package in PACKAGES for name, file in modules_of(package).items()}
    rooms = {name for name in modules if not ROOMS.isdisjoint(name.split("."))}
    own = [
        *FILES,
        *(modules[name] for name in modules if name not in rooms and modules[name] in BACKENDS),
    ]
    found = {f"{file.parent.name}/{file.name}": needed_by(file, rooms) for file in own}
    assert {name: needed for name, needed in found.items() if needed} == JOINTS


@pytest.mark.parametrize("package", PACKAGES, ids=lambda package: package.name)
def test_no_module_needs_one_that_needs_it(package):
    """The modules of a package can be put in an order in which each imports earlier ones alone.

    All imports that run count: in functions; by a name in a string, as for import_module and in
    the tables of __getattr__; and of the module itself. Those for types alone do not run.
    ``from package import x`` is an import of the module package.x where there is one, else of the
    package's __init__. That __init__ runs before any of its modules, as Python has it, does not
    count.
    """
    modules = modules_of(package)
    graph = {name: needed_by(file, modules) for name, file in modules.items()}
    graph.get("cgshim", set()).discard("cgshim.testing")  # an attribute, for users
    assert len(in_order(graph)) == len(modules)


@pytest.mark.parametrize(
    "back",
    [
        "def f():\n    from p.a import x\n", "from p import a\n", "import p.a as a\n", "import_module('p.a')\n",
        "if not TYPE_CHECKING:\n    import p.a\n", "if TYPE_CHECKING:\n    pass\nelse:\n    import p.a\n",
        "LAZY = {'x': 'p.a'}\n", "import_module(f'p.{name}')\n", "import p\n", "from p import x\n",
    ],
)  # fmt: skip
def test_a_circle_is_named(tmp_path, back):
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("from p.a import x as x\n")
    (package / "a.py").write_text("import p.b\n")
    (package / "b.py").write_text(back)
    modules = modules_of(package)
    with pytest.raises(CycleError, match=r"'p\.a', 'p\.b'|'p\.b', 'p\.a'|'p', 'p\.b'|'p\.b', 'p'"):
        in_order({name: needed_by(file, modules) for name, file in modules.items()})


def test_what_types_need_is_no_circle(tmp_path):
    package = tmp_path / "p"
    package.mkdir()
    (package / "__init__.py").write_text("from p.a import x as x\n")
    (package / "a.py").write_text('"""Of p.b."""\nfrom p import b\n')
    (package / "b.py").write_text("if TYPE_CHECKING:\n    from p.a import x\n")
    modules = modules_of(package)
    assert in_order({name: needed_by(file, modules) for name, file in modules.items()}) == [
        "p.b",
        "p.a",
        "p",
    ]


NAMES = {"jax", "tensorflow", "torch"}
KNOWN = {"cgshim/_foreign.py": {"torch"}, "cgshim/_op.py": {"tensorflow"}}
"""the tracer of torch.compile; and __tf_tracing_type__, which only TensorFlow calls"""


def named_by(file: Path) -> set[str]:
    """Return the frameworks that a file names in its code or imports; what it says in prose is
    longer.
    """
    found: set[str] = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.add(node.value)
        elif isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            found.add((node.module or "").partition(".")[0])
    return found & NAMES


@pytest.mark.parametrize(
    "file", [*FILES, *OTHER_ROOMS], ids=lambda file: f"{file.parent.name}/{file.name}"
)
def test_the_front_end_has_nothing_for_one_framework_alone(file):
    assert named_by(file) == KNOWN.get(f"{file.parent.name}/{file.name}", set())


def test_a_framework_that_is_named_would_be_seen(tmp_path):
    for code in ("import torch.nn", "from jax import numpy", "if name == 'tensorflow':\n    pass"):
        (tmp_path / "a.py").write_text(code)
        assert len(named_by(tmp_path / "a.py")) == 1


def test_what_a_backend_may_offer_is_told_to_third_parties():
    """All that the front end looks for in a backend stands in docs/writing-a-backend.md."""
    calls = [node for file in ROOT.rglob("*.py") for node in ast.walk(ast.parse(file.read_text()))]
    calls = [
        node
        for node in calls
        if isinstance(node, ast.Call) and getattr(node.func, "id", "") in LOOKS
    ]
    of_backends = [
        call for call in calls if getattr(call.args[0], "id", "") in ("backend", "module")
    ]
    members = {call.args[1].value for call in of_backends if isinstance(call.args[1], ast.Constant)}
    members = {member for member in members if not member.startswith("__")}
    assert {"numpy_function", "dtype_name"} <= members
    document = (Path(__file__).parents[2] / "docs" / "writing-a-backend.md").read_text()
    assert not [member for member in members if f"`{member}" not in document]

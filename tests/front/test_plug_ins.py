"""Plug-ins of third parties with a fault: nobody else is harmed, and the culprit is named to whoever
asks for it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, NamedTuple

import pytest

import cgshim
from cgshim._protocol import REQUIRED

Files = dict[str, "str | bytes | None"]

# a module with all members: a third party's, as far as cgshim can know
WORKS = "from cgshim_numpy import *\n"
RAISES = "raise RuntimeError('too old')"
SMALL = "Metadata-Version: 2.1\nName: small-plugin\nVersion: 1.0\n"
METADATA = "Metadata-Version: 2.1\nName: tiny-plugin\nVersion: 1.0\n"


def distribution(
    backends: str = "tiny = tiny_plugin",
    *,
    aliases: str = "",
    module: str | None = WORKS,
    stem: str = "tiny_plugin",
    metadata: str | bytes | None = METADATA,
) -> Files:
    """Return the files of an installed distribution, and of the framework that it is for."""
    return {
        f"{stem}-1.0.dist-info/METADATA": metadata,
        f"{stem}-1.0.dist-info/entry_points.txt": f"[cgshim.backends]\n{backends}\n[cgshim.aliases]\n{aliases}\n",
        f"{stem}.py": module,
        "tiny.py": "",
    }


class Fault(NamedTuple):
    """A fault, what cgshim says of it, and the name of the backend that cannot be had for it, if
    any.
    """

    files: Files
    message: str
    name: str | None = "tiny"
    owner: str = "tiny-plugin"


def broken(
    module: str | None, got: str, must: str = "must import", *lines: str, **files: Any
) -> Fault:
    """Return the fault of a plug-in that is found and fails."""
    do = "mend or uninstall tiny-plugin, and start Python anew"
    message = f"cgshim: the backend 'tiny' of tiny-plugin {must}, got {got}; {do}"
    return Fault(distribution(*lines, module=module, **files), message)


def unnamed(fault: Fault) -> Fault:
    """Return the fault of a distribution whose metadata do not tell its name: its folder does."""
    return fault._replace(
        message=fault.message.replace("tiny-plugin", "tiny_plugin"), owner="tiny_plugin"
    )


def misread(got: str, must: str, files: Files, name: str | None = None) -> Fault:
    """Return a fault in the metadata."""
    return Fault(
        files, f"cgshim: {must}, got {got} of tiny-plugin; mend or uninstall tiny-plugin", name
    )


def misspelled(shown: str, name: str | None, line: str | None = None) -> Fault:
    files = distribution(shown if line is None else line)
    return misread(repr(shown), "cgshim.backends must read import_root = module", files, name)


def reserved(name: str) -> Fault:
    files = distribution(f"{name} = tiny_plugin", module=RAISES)
    return misread(repr(name), "types of Python's own modules belong to no framework", files, name)


LACKS = "must have the functions of a backend"
TWICE = "cgshim: the {} must be registered once, got {} and {}; uninstall all but one"
UNREADABLE = distribution() | {
    "tiny_plugin-1.0.dist-info/entry_points.txt": b"[cgshim.backends]\ntiny = \xff"
}

FAULTS = {
    "it raises": broken(RAISES, "RuntimeError: too old"),
    "it exits": broken("import sys\nsys.exit(3)", "SystemExit: 3"),
    "it is slow, and raises": broken(f"import time\ntime.sleep(0.2)\n{RAISES}", "RuntimeError: too old"),
    "its error cannot be printed": broken(
        "class Odd(Exception):\n    def __str__(self):\n        raise RuntimeError\nraise Odd", "Odd"
    ),
    "its error has several lines": broken("raise RuntimeError('too\\n  old')", "RuntimeError: too old"),
    "it is no Python": broken("1 +", "SyntaxError: invalid syntax (tiny_plugin.py, line 1)"),
    "it is not there": broken(None, "ModuleNotFoundError: No module named 'tiny_plugin'"),
    "a dependency is not there": broken("import kernels", "ModuleNotFoundError: No module named 'kernels'"),
    "its framework lacks a name": broken(
        "from tiny import Tensor", "ImportError: cannot import name 'Tensor' from 'tiny' ({site}/tiny.py)"
    ),
    "its framework is not there": Fault(
        distribution(module="import tiny") | {"tiny.py": None},
        "cgshim: the backend 'tiny' needs its framework, got ModuleNotFoundError: No module named 'tiny'; "
        "install what is imported as tiny",
    ),
    "it is empty": broken("", f"no {', '.join(REQUIRED[:-1])} and {REQUIRED[-1]}", LACKS),
    "two functions are missing": broken(f"{WORKS}del stop_gradient, vjp", "no stop_gradient and vjp", LACKS),
    "a function is none": broken(f"{WORKS}is_tensor = True", "no is_tensor", LACKS),
    "asking it for a function exits": broken("def __getattr__(name):\n    raise SystemExit(2)", "SystemExit: 2"),
    "a function fails": broken(
        f"{WORKS}def tree_flatten(tree):\n    raise KeyError(0)", "KeyError: 0"
    ),
    "it is an object": broken(
        "import sys\nsys.modules[__name__] = object()", "TypeError: tiny_plugin is no module"
    ),
    "it is a function": broken(
        WORKS, "TypeError: tiny_plugin:vjp is no module", "must import", "tiny = tiny_plugin:vjp"
    ),
    "it is an attribute that is not there": broken(
        "", "AttributeError: module 'tiny_plugin' has no attribute 'a'", "must import", "tiny = tiny_plugin:a"
    ),
    "METADATA is not there": unnamed(broken(RAISES, "RuntimeError: too old", metadata=None)),
    "METADATA is empty": unnamed(broken(RAISES, "RuntimeError: too old", metadata="")),
    "METADATA is not text": unnamed(broken(RAISES, "RuntimeError: too old", metadata=b"Name: \xff\xfe")),
    "entry points are not text": misread(
        "UnicodeDecodeError: 'utf-8' codec can't decode byte 0xff in position 25: invalid start byte",
        "entry points must be readable", UNREADABLE,
    ),
    "the line has no =": misspelled("tiny =", "tiny", "tiny"),
    "the line has no value": misspelled("tiny =", "tiny"),
    "the line has no name": misspelled("= tiny_plugin", None),
    "the value is nonsense": misspelled("tiny = no module!", "tiny"),
    "the name is dotted": misspelled("tiny.core = tiny_plugin", "tiny.core"),
    "the name is nonsense": misspelled("tiny core = tiny_plugin", "tiny core"),
    "the name is that of builtins": reserved("builtins"),
    "the name is that of the program": reserved("__main__"),
    "the name is that of the standard library": reserved("collections"),
    "the name is cgshim's own": misread(
        "tiny_plugin", "the backend 'numpy' must be cgshim's own", distribution("numpy = tiny_plugin", module=RAISES)
    ),
    "two distributions have the name": Fault(
        distribution() | distribution(stem="small_plugin", metadata=SMALL),
        TWICE.format("backend 'tiny'", "tiny_plugin of small-plugin", "tiny_plugin of tiny-plugin"),
    ),
    "one distribution has the name twice": Fault(
        distribution("tiny = tiny_plugin\ntiny = other"),
        TWICE.format("backend 'tiny'", "other of tiny-plugin", "tiny_plugin of tiny-plugin"),
    ),
    "an alias leads nowhere": misread(
        "'tyni'", "an alias (little) must be that of a backend", distribution(aliases="little = tyni")
    ),
    "an alias has no value": misread(
        "''", "an alias (little) must be that of a backend", distribution(aliases="little")
    ),
    "an alias takes another's types": misread(
        "an alias for 'tiny'", "types of numpy have a backend already",
        distribution(aliases="numpy = tiny", module=RAISES),
    ),
    "an alias takes the types of cgshim's alias": misread(
        "an alias for 'tiny'", "types of autograd have a backend already",
        distribution(aliases="autograd = tiny", module=RAISES),
    ),
    "an alias takes everybody's types": misread(
        "'builtins'", "types of Python's own modules belong to no framework",
        distribution(aliases="builtins = tiny", module=RAISES),
    ),
    "two aliases are different": Fault(
        distribution(aliases="little = tiny")
        | distribution("small = small_plugin", aliases="little = small", stem="small_plugin", metadata=SMALL),
        TWICE.format("alias 'little'", "small of small-plugin", "tiny of tiny-plugin"),
        None,
    ),
}  # fmt: skip

PROGRAM = """
import contextlib, io, json, sys
import numpy as np
import cgshim
from cgshim.__main__ import main

name, square = json.loads(sys.argv[1]), cgshim.op_custom_gradient(lambda x, _: (x * x, lambda u: (7.0 * u * x, None)))
with contextlib.suppress(ImportError):
    import tiny  # from here on, a call with an object looks if it is a tree of tiny's
found = {"gradient": cgshim.op_grad(lambda x: 3.0 * cgshim.op_sum(square(x, object())))(np.array([2.0, 5.0])).tolist()}
found["constant"] = square(3.0, None)
found["available"] = cgshim.available_backends()
found["errors"] = []
for _ in range(2 if name is not None else 0):
    try:
        cgshim.set_backend(name)
    except cgshim.BackendError as error:
        found["errors"].append(str(error))
for key, options in ("table", []), ("required", ["--require", f"numpy,{name or 'numpy'}"]):
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
        found[key] = [main(options), printed.getvalue()]
print(json.dumps(found))
"""


def install(site: Path, files: Files) -> Path:
    for path, content in files.items():
        if content is not None:
            (site / path).parent.mkdir(parents=True, exist_ok=True)
            (site / path).write_bytes(content.encode() if isinstance(content, str) else content)
    return site


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS.keys())
def test_a_fault_is_its_owners_alone(python, tmp_path: Path, fault: Fault) -> None:
    result = python("-c", PROGRAM, json.dumps(fault.name), path=(install(tmp_path, fault.files),))
    assert result.returncode == 0, result.stderr
    found = json.loads(result.stdout)
    assert (found["gradient"], found["constant"]) == ([42.0, 105.0], 9.0)
    assert set(found["available"]) - {"tiny", "small"} == set(cgshim.available_backends())
    message = fault.message.format(site=tmp_path)
    assert found["errors"] == ([] if fault.name is None else [message] * 2)
    assert found["table"][0] == 0
    assert fault.owner in found["table"][1]
    status, table = found["required"]
    assert (status, message in table) == (int(fault.name is not None), True)


def test_a_tensor_of_a_broken_plug_in_is_never_a_constant(python, tmp_path: Path) -> None:
    """Nor one of a framework with two backends, or with a misspelled one: its gradient would be
    lost.
    """
    program = """
import cgshim, tiny
try:
    cgshim.op_custom_gradient(lambda x: (x, lambda u: u))(tiny.Tensor())
except cgshim.BackendError as error:
    print(error)
"""
    tensor: Files = {"tiny.py": "class Tensor:\n    pass\n"}
    for name in ("it raises", "two distributions have the name", "the line has no value"):
        files, message, *_ = FAULTS[name]
        assert (
            python("-c", program, path=(install(tmp_path / name, files | tensor),)).stdout
            == f"{message}\n"
        )


def test_a_broken_plug_in_is_imported_once(python, tmp_path: Path) -> None:
    program = """
import cgshim, numpy, tiny
square = cgshim.op_custom_gradient(lambda x, _: (x * x, lambda u: (7.0 * u * x, None)))
for _ in range(3):
    square(numpy.ones(2), object())
for _ in range(2):
    try:
        cgshim.set_backend("tiny")
    except cgshim.BackendError:
        print("refused")
"""
    site = install(tmp_path, distribution(module=f"print('imported')\n{RAISES}"))
    result = python("-c", program, path=(site,))
    assert (result.stdout, result.stderr) == ("imported\nrefused\nrefused\n", "")


def test_an_interrupt_is_the_users(python, tmp_path: Path) -> None:
    site = install(tmp_path, distribution(module="raise KeyboardInterrupt('by hand')"))
    result = python("-c", "import cgshim\ncgshim.set_backend('tiny')", path=(site,))
    assert result.returncode
    assert result.stderr.endswith("KeyboardInterrupt: by hand\n")


def test_the_command_names_every_culprit(python, tmp_path: Path) -> None:
    """Each in an installation of its own, on one path; what works is ok, and so is the command."""
    names = (
        "it exits",
        "the name is dotted",
        "two distributions have the name",
        "an alias leads nowhere",
    )
    path = [
        install(
            tmp_path / "works",
            distribution("small = small_plugin", stem="small_plugin", metadata=SMALL),
        )
    ]
    (path[0] / "small.py").touch()
    for at, name in enumerate(names):
        path.append(install(tmp_path / name, FAULTS[name].files))
        metadata = tmp_path / name / "tiny_plugin-1.0.dist-info" / "METADATA"
        metadata.write_text(metadata.read_text().replace("tiny-plugin", f"tiny-plugin-{at}"))
    result = python("-m", "cgshim", "--require", "small,numpy", path=tuple(path))
    assert (result.returncode, result.stderr) == (0, "")
    rows = {line.split()[0]: line for line in result.stdout.splitlines()}
    assert rows["small"].endswith(" ok")
    assert rows["small"].split()[1:4] == ["small_plugin", "(small-plugin", "1.0)"]
    for at in range(len(names)):
        assert f"of tiny-plugin-{at}" in result.stdout


def test_a_distribution_that_is_found_twice_is_one(python, tmp_path: Path) -> None:
    """As with a wheel beside a checkout: the first is taken, as Python takes its modules."""
    again = distribution(metadata=METADATA.replace("tiny-plugin", "Tiny.Plugin"), module=RAISES)
    path = (install(tmp_path / "checkout", distribution()), install(tmp_path / "wheel", again))
    result = python("-m", "cgshim", "--require", "tiny", path=path)
    assert result.returncode == 0, result.stdout
    assert "tiny_plugin (tiny-plugin 1.0)" in result.stdout


@pytest.mark.parametrize(
    ("requires", "command"),
    {
        "Provides-Extra: tiny\nRequires-Dist: tinyframework>=2.1; extra == 'tiny'": "pip install 'tiny-plugin[tiny]'",
        "Requires-Dist: Tiny>=2.1\nRequires-Dist: numpy": "pip install 'Tiny>=2.1'",
        "Requires-Dist: tiny-kernels\nRequires-Dist: tiny; extra == 'test'": None,
    }.items(),
)
def test_what_to_install_is_told_by_the_owners_metadata(
    python, tmp_path: Path, requires: str, command: str
) -> None:
    files = distribution(module="import tiny", metadata=METADATA + requires + "\n") | {
        "tiny.py": None
    }
    site = install(tmp_path, files)
    program = (
        "import cgshim\ntry:\n    cgshim.set_backend({!r})\n"
        "except cgshim.BackendError as error:\n    print(error)"
    )
    missing = python("-c", program.format("tiny"), path=(site,)).stdout
    do = f"run {command}" if command else "install what is imported as tiny"
    assert missing == (
        f"cgshim: the backend 'tiny' needs its framework, got ModuleNotFoundError: No module named 'tiny'; {do}\n"
    )
    assert (
        f"tiny ({command or 'by tiny-plugin'})"
        in python("-c", program.format("nonesuch"), path=(site,)).stdout
    )
    table = python("-m", "cgshim", path=(site,)).stdout
    assert f" missing: {command or 'install what is imported as tiny'}\n" in table
    assert (">=2.1 " in table) == bool(command)


def test_a_framework_that_was_missing_is_found_without_a_new_process(
    python, tmp_path: Path
) -> None:
    program = """
import cgshim, importlib, pathlib, sys
for _ in range(2):
    try:
        cgshim.set_backend("tiny")
        print(cgshim.config_backend())
    except cgshim.BackendError as error:
        print("missing")
    pathlib.Path(sys.argv[1], "tiny.py").touch()
    importlib.invalidate_caches()
"""
    site = install(tmp_path, distribution(module=f"import tiny\n{WORKS}") | {"tiny.py": None})
    assert python("-c", program, str(site), path=(site,)).stdout == "missing\ntiny\n"


def test_a_stranger_gives_functions_that_nobody_else_has(python, tmp_path: Path) -> None:
    """cgshim.ops asks the plug-in first, and autoray only if it has no numpy_function."""
    module = f"{WORKS}def numpy_function(name):\n    return (lambda x: 7 * x) if name == 'heaviside' else None\n"
    program = """
import cgshim, numpy
from cgshim import ops
with cgshim.use_backend("tiny"):
    print(ops.heaviside(numpy.float64(3.0)))
    try:
        ops.spacing(numpy.float64(3.0))
    except cgshim.BackendError as error:
        print(error)
"""
    result = python("-c", program, path=(install(tmp_path, distribution(module=module)),))
    assert result.stdout == (
        "21.0\nop_spacing: NumPy's spacing must exist in tiny, got nothing that gives its numbers; "
        "call tiny's own function\n"
    ), result.stderr

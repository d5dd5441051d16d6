"""The text of cgshim/ops/__init__.pyi: the functions of docs/ops.md, with NumPy's parameters."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator
from operator import attrgetter
from pathlib import Path
from typing import Any

import compare
import numpy as np

from cgshim import ops
from cgshim.ops import _numpy

HEAD = '''\
# ruff: noqa: N803
"""The names and parameters of cgshim.ops, for type checkers and editors; `nox -s pages` writes it."""

from collections.abc import Sequence
from typing import Any

'''
_IMPORTS = re.compile(
    r"^from cgshim\.ops\.(?:_control|_tensors) import (?:\([^)]*\)|.*)", re.MULTILINE
)
"""the imports of the functions that cgshim.ops has beside NumPy's"""
OWN = ("shape",)
"""cgshim's own, with another docstring than NumPy's"""
SPACES = ("linalg", "fft", "special")
NOWHERE = {
    "out",
    "subok",
    "like",
    "device",
    "casting",
    "overwrite_input",
    "overwrite_b",
    "check_finite",
}
"""parameters that change no number"""
WRITTEN = {
    "arange": "start: Any, stop: Any = None, step: Any = 1, dtype: Any = None",
    "reshape": "a: Any, /, shape: int | Sequence[int], order: Any = 'C'",
    "einsum": "subscripts: str, /, *operands: Any",
    "pad": "array: Any, pad_width: Any, mode: Any = 'constant', *, constant_values: Any = 0",
    "relu": "x: Any",
    "sigmoid": "x: Any",
    "softplus": "x: Any",
    "softmax": "x: Any, axis: Any = -1",
    "log_softmax": "x: Any, axis: Any = -1",
    "logsumexp": "a: Any, axis: Any = None, *, keepdims: bool = False",
    "one_hot": "x: Any, num_classes: int, *, dtype: Any = None, axis: int = -1",
    "top_k": "operand: Any, k: int",
}
"""what NumPy lacks, or has with parameters that Python cannot read"""


def names_of(page: str) -> list[str]:
    """The functions of docs/ops.md."""
    return [name for names in compare.documented(page, "On").values() for name in names]


def stub(page: str) -> str:
    names = dict.fromkeys(name for name in names_of(page) if name not in OWN)
    lines = [HEAD, *_IMPORTS.findall(Path(ops.__file__ or "").read_text())]
    for space in SPACES:
        lines += ["", f"class _{space.title()}:"]
        own = [name for name in names if name.startswith(f"{space}.")]
        lines += [f"    def {_definition(name, 'self, ')}" for name in own]
    lines += ["", *(f"{space}: _{space.title()}" for space in SPACES)]
    lines += [f"def {_definition(name, '')}" for name in names if "." not in name]
    return "\n".join(lines) + "\n"


def _definition(name: str, first: str) -> str:
    own = name.rpartition(".")[2]
    written = WRITTEN.get(name) or ", ".join(_parameters(name))
    return f"{own}({first}{written}) -> Any: ..."


def _parameters(name: str) -> Iterator[str]:
    function = _numpys(name)
    if isinstance(function, np.ufunc):
        yield from (
            [f"x{at}: Any" for at in range(1, function.nin + 1)] if function.nin > 1 else ["x: Any"]
        )
        yield "/"
        return
    before: Any = None
    for parameter in inspect.signature(function).parameters.values():
        if parameter.name in NOWHERE or parameter.kind is parameter.VAR_KEYWORD:
            continue
        if before is parameter.POSITIONAL_ONLY is not parameter.kind:
            yield "/"
        if parameter.kind is parameter.KEYWORD_ONLY and before not in (
            parameter.KEYWORD_ONLY,
            parameter.VAR_POSITIONAL,
        ):
            yield "*"
        before = parameter.kind
        yield _parameter(parameter)
    if before is inspect.Parameter.POSITIONAL_ONLY:
        yield "/"


def _parameter(parameter: inspect.Parameter) -> str:
    if parameter.kind is parameter.VAR_POSITIONAL:
        return f"*{parameter.name}: Any"
    default = parameter.default
    if default is parameter.empty:
        return f"{parameter.name}: Any"
    is_plain = default is None or type(default) in (bool, int, float, str)
    return f"{parameter.name}: Any = {default!r}" if is_plain else f"{parameter.name}: Any = ..."


def _numpys(name: str) -> Any:
    """NumPy's function, SciPy's, or cgshim's definition, where the others have no parameters."""
    name = _numpy._ALIASES.get(name, name)
    definition = _numpy.definition(name)
    try:
        found = attrgetter(name)(compare.Reference())
        isinstance(found, np.ufunc) or inspect.signature(found)
    except (AttributeError, ValueError):
        return definition
    return found

"""python blocks.py PAGE BACKEND: run the Python of a page of Markdown as a reader does, from its
top to its end.

A page chooses its backend by `cgshim.set_backend("numpy")`, in whose place another one may be put.
A block in a tab is for the framework that the tab's label, a line in bold type, names. A block
without a label that begins with `import torch` is for PyTorch, and so on. A block needs nothing but
cgshim and its framework.
"""

from __future__ import annotations

import doctest
import os
import re
import sys
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

BACKENDS = {
    "PyTorch": "torch",
    "JAX": "jax",
    "TensorFlow": "tensorflow",
    "Keras": "tensorflow",
    "NumPy": "numpy",
}
IMPORT = re.compile(r"(?:>>> )?import (torch|jax|tensorflow)\n")
PARTS = re.compile(
    r"^\*\*(?P<label>\w+)\*\*\n|^<!-- end of tabs -->|^```python\n(?P<code>.*?)^```$", re.M | re.S
)


class Block(NamedTuple):
    """What stands between ```python and ```, at which line, and under which label of a tab, if any."""

    code: str
    line: int
    label: str | None


def blocks(text: str) -> Iterator[Block]:
    """Yield the blocks of Python in a page."""
    label = None
    for part in PARTS.finditer(text):
        if part["code"] is None:
            label = part["label"]
        else:
            yield Block(part["code"], text.count("\n", 0, part.start()) + 1, label)


def run(path: Path, backend: str, **names: Any) -> dict[str, Any]:
    """Run those blocks of a page that are for a backend; return all names that they have made."""
    module = types.ModuleType(f"blocks_of_{path.stem}")
    sys.modules[module.__name__] = module  # torch.compile imports the module of a function
    vars(module).update(names)
    for block in blocks(path.read_text()):
        if backend_of(block) in (None, backend):
            run_block(block, path, backend, vars(module))
    return vars(module)


def backend_of(block: Block) -> str | None:
    """Return the backend that a block is for, or None if it is for all."""
    if block.label is not None:
        return BACKENDS[block.label]
    imported = IMPORT.match(block.code)
    return imported[1] if imported else None


def run_block(block: Block, path: Path, backend: str, names: dict[str, Any]) -> None:
    code = block.code.replace('set_backend("numpy")', f'set_backend("{backend}")')
    if not code.startswith(">>>"):
        exec(compile("\n" * block.line + code, str(path), "exec"), names)
        return
    test = doctest.DocTestParser().get_doctest(code, {}, path.name, str(path), block.line)
    test.globs = names  # and no copy of them
    said: list[str] = []
    runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE)
    failed, _ = runner.run(test, out=said.append, clear_globs=False)
    assert not failed, "".join(said)


if __name__ == "__main__":
    os.environ.setdefault("KERAS_BACKEND", sys.argv[2])
    run(Path(sys.argv[1]), sys.argv[2])
    print(f"{sys.argv[1]}: every block runs on {sys.argv[2]}")

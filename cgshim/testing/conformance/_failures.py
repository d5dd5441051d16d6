"""The reason and the place of a failed case, each in one line."""

from __future__ import annotations

import linecache
import textwrap
import traceback
from pathlib import Path

_HERE = Path(__file__).parent
_HELPERS = frozenset(["_common.py", "_framework.py", "_registry.py"])


def reason_of(error: BaseException) -> str:
    """Return the error in one line; an assertion without a message is shown by its source."""
    text = " ".join(str(error).split()) or _source_of(error)
    return textwrap.shorten(f"{type(error).__name__}: {text}".removesuffix(": "), 300)


def place_of(error: BaseException, backend: object) -> str:
    """Return file:line of an error: the innermost line of the backend, or else of the case."""
    frames = traceback.extract_tb(error.__traceback__)
    in_backend = [frame for frame in frames if _is_in(frame, backend)]
    in_case = [frame for frame in frames if _is_of_a_case(frame)]
    chosen = [*frames[-1:], *in_case[-1:], *in_backend[-1:]]
    return f"{chosen[-1].filename}:{chosen[-1].lineno}" if chosen else ""


def _source_of(error: BaseException) -> str:
    frames = traceback.extract_tb(error.__traceback__)
    return linecache.getline(frames[-1].filename, frames[-1].lineno or 0).strip() if frames else ""


def _is_in(frame: traceback.FrameSummary, backend: object) -> bool:
    file = getattr(backend, "__file__", None)
    if file is None:
        return False
    root = Path(file).parent if hasattr(backend, "__path__") else Path(file)
    return Path(frame.filename).is_relative_to(root)


def _is_of_a_case(frame: traceback.FrameSummary) -> bool:
    path = Path(frame.filename)
    return path.parent == _HERE and path.name not in _HELPERS

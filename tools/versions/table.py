"""List the versions of the frameworks and of Python that `python tools/versions/run.py` tests."""

from __future__ import annotations

from typing import NamedTuple

PACKAGES = {
    "numpy": "numpy",
    "autograd": "autograd",
    "jax": "jax",
    "torch": "torch",
    "tensorflow": "tensorflow-cpu",
}
"""The package of each backend's framework, and autograd. PyPI's builds of PyTorch are those for CUDA; they run without
a GPU."""

# backend: version: the NumPy that fits it, and the oldest and the newest Python that have wheels of
# both.
TABLE: dict[str, dict[str, tuple[str, tuple[str, ...]]]] = {
    "numpy": {
        "1.26": ("1.26", ("3.10", "3.12")),
        "2.0": ("2.0", ("3.10", "3.12")),
        "2.1": ("2.1", ("3.10", "3.13")),
        "2.2": ("2.2", ("3.10", "3.13")),
        "2.3": ("2.3", ("3.11", "3.13")),
        "2.4": ("2.4", ("3.11", "3.13")),
        "2.5": ("2.5", ("3.12", "3.13")),
    },
    "autograd": {
        "1.7": ("1.26", ("3.10", "3.12")),
        "1.8": ("2.4", ("3.11", "3.13")),
    },
    "jax": {
        "0.4": ("1.26", ("3.10", "3.12")),
        "0.5": ("2.0", ("3.10", "3.12")),
        "0.6": ("2.2", ("3.10", "3.13")),
        "0.7": ("2.3", ("3.11", "3.13")),
        "0.8": ("2.3", ("3.11", "3.13")),
        "0.9": ("2.4", ("3.11", "3.13")),
        "0.10": ("2.4", ("3.11", "3.13")),
        "0.11": ("2.5", ("3.12", "3.13")),
        "0.12": ("2.5", ("3.12", "3.13")),
    },
    "torch": {
        "2.6": ("1.26", ("3.10", "3.12")),
        "2.8": ("2.2", ("3.10", "3.13")),
        "2.9": ("2.2", ("3.10", "3.13")),
        "2.10": ("2.3", ("3.11", "3.13")),
        "2.12": ("2.4", ("3.11", "3.13")),
        "2.13": ("2.4", ("3.11", "3.13")),
        "2.15": ("2.4", ("3.11", "3.13")),
    },
    "tensorflow": {
        "2.18": ("1.26", ("3.10", "3.12")),
        "2.19": ("2.1", ("3.10", "3.12")),
        "2.20": ("2.3", ("3.11", "3.13")),
        "2.21": ("2.4", ("3.11", "3.13")),
    },
}


class Cell(NamedTuple):
    """One version of a framework on one Python."""

    backend: str
    version: str
    numpy: str
    python: str

    @property
    def name(self) -> str:
        return f"{self.backend}-{self.version}-py{self.python}"

    @property
    def tested(self) -> str:
        """The backend whose cases run."""
        return "numpy" if self.backend == "autograd" else self.backend

    @property
    def requirements(self) -> list[str]:
        """What pip installs: the newest patches of these two; NumPy alone, where it is the
        framework.
        """
        return sorted({f"{PACKAGES[self.backend]}=={self.version}.*", f"numpy=={self.numpy}.*"})


CELLS = [
    Cell(backend, version, numpy, python)
    for backend, versions in TABLE.items()
    for version, (numpy, pythons) in versions.items()
    for python in pythons
]


def cells(words: list[str]) -> list[Cell]:
    """Return the cells whose names begin with one of the words, as `torch-2.6` or `jax`; all cells
    for no word.
    """
    unknown = [word for word in words if not any(_begins(cell, word) for cell in CELLS)]
    if unknown:
        raise SystemExit(
            f"no such cells: {', '.join(unknown)}; there are {', '.join(cell.name for cell in CELLS)}"
        )
    return [cell for cell in CELLS if not words or any(_begins(cell, word) for word in words)]


def _begins(cell: Cell, word: str) -> bool:
    return f"{cell.name}-".startswith(f"{word}-")

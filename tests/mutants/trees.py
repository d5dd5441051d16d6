"""Copies of the tree, one for each worker, in which mistakes are planted and tests run."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

COPIED = ["cgshim", "backends", "tests", "examples", "docs", "benchmarks"]
FILES = [
    "pyproject.toml",
    "README.md",
    "CHANGELOG.md",
    "CONTRIBUTING.md",
    "noxfile.py",
    "constraints.txt",
    "LICENSE",
]
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1",
    "TF_CPP_MIN_LOG_LEVEL": "3",
    "JAX_ENABLE_X64": "1",  # as the tests set it, before JAX is imported
}


def copy(root: Path, to: Path) -> Path:
    """The package, its tests and what they read, as they are now."""
    shutil.rmtree(to, ignore_errors=True)
    to.mkdir(parents=True)
    for name in COPIED:
        shutil.copytree(root / name, to / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy2(root / name, to / name)
    # A file's bytecode is looked up by what the file says: two mutants can be written in the same
    # second.
    compiled = [
        "-m",
        "compileall",
        "-q",
        "--invalidation-mode",
        "checked-hash",
        "cgshim",
        "backends",
    ]
    subprocess.run([sys.executable, *compiled], cwd=to, check=True)
    return to


class Tree:
    """A copy, and its processes that wait with a framework imported."""

    def __init__(self, at: Path) -> None:
        self.at = at
        self.servers: dict[str, subprocess.Popen[str]] = {}

    def run(
        self,
        backend: str,
        paths: list[str],
        tests: list[str] | None,
        limit: float,
        *options: str,
        **more: str,
    ) -> Any:
        """Run tests in a fork of the backend's process; how that ended."""
        job = {
            "paths": paths,
            "tests": tests,
            "limit": limit,
            "options": ["-q", "-n0", *options],
            **more,
        }
        server = self._server(backend)
        assert server.stdin is not None
        assert server.stdout is not None
        server.stdin.write(json.dumps(job) + "\n")
        server.stdin.flush()
        answer = server.stdout.readline()
        if not answer:
            raise SystemExit(
                f"the process of {backend} in {self.at} ended: see {self.at / f'{backend}.log'}"
            )
        return json.loads(answer)

    def _server(self, backend: str) -> subprocess.Popen[str]:
        if backend not in self.servers:
            path = os.pathsep.join([str(self.at), str(self.at / "backends")])
            environment = os.environ | ENVIRONMENT | {"PYTHONPATH": path}
            self.servers[backend] = subprocess.Popen(
                [sys.executable, "tests/mutants/server.py", backend], cwd=self.at, env=environment, text=True,
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=(self.at / f"{backend}.log").open("w"),
            )  # fmt: skip
        return self.servers[backend]

    def close(self) -> None:
        for server in self.servers.values():
            assert server.stdin is not None
            server.stdin.close()
            server.wait()
        self.servers.clear()


def told_apart(root: Path, names: list[str]) -> str:
    """A short word for what stands in these folders and files now."""
    paths = sorted(path for name in names for path in _files(root / name))
    content = hashlib.sha256()
    for path in paths:
        content.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return content.hexdigest()[:12]


def _files(path: Path) -> list[Path]:
    return [path] if path.is_file() else [found for found in path.rglob("*.py") if found.is_file()]

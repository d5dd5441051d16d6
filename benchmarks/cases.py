"""What is measured: one row a case, and for each backend the ratio to code by hand that it should
not exceed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple

EVERYWHERE = ("numpy", "jax", "torch", "tensorflow")


class Case(NamedTuple):
    """An op, in a use of it that a framework knows by name, on arguments of a size."""

    name: str
    op: str
    use: str
    """the function, in the benchmarks of each framework that has it, that makes a run of an op and its arguments"""
    size: int = 1
    """how many elements a tensor has; one is a scalar"""
    width: int = 1
    """how many leaves, levels or equations"""
    targets: Mapping[str, float] = MappingProxyType({})
    measured: str = "times"
    table: str = "calls"
    """where it stands on the page: programs, functions or calls"""


EAGER = {"torch": 1.35, "jax": 0.9, "tensorflow": 1.0, "numpy": 1.5}
SECOND_ORDER = {"jax": 1.3, "tensorflow": 1.1}
COMPILED = {"torch": 1.02, "jax": 1.02, "tensorflow": 1.02}
FUNC = {"torch": 1.25}
FORWARD_MODE = {"jax": 1.1, "torch": 1.5, "tensorflow": 1.3}
TRANSPOSED = {"jax": 1.1, "torch": 2.0}
LARGE = {"torch": 1.08}
WIDE = dict.fromkeys(EVERYWHERE, 1.5)
MEMORY = dict.fromkeys(("numpy", "torch", "tensorflow"), 1.01)
PLAIN = {"torch": 1.45, "numpy": 2.3}
VMAP_ON_HOST = dict.fromkeys(("jax", "torch", "tensorflow"), 0.2)
FACTORS_ON_HOST = dict.fromkeys(("jax", "torch", "tensorflow"), 1.6)

FUNCTIONS = """
exp add maximum where clip power sum sum_of_axis mean_of_axis max_of_axis reshape transpose expand_dims stack
concatenate matmul outer einsum zeros_like softmax
"""
"""of `cgshim.ops`; `benchmarks/functions.py` says with which arguments"""

PROGRAMS = [
    Case("training step of an MLP, eager", "log1pexp", "training_step", 16 * 32, table="programs"),
    Case("training step of an MLP, compiled", "log1pexp", "compiled_training_step", 16 * 32, table="programs"),
    Case("Kalman filter of 50 observations, eager", "kalman", "filtering", table="programs"),
    Case("Kalman filter of 50 observations, compiled", "kalman", "compiled_filtering", table="programs"),
]  # fmt: skip

CASES = [
    *PROGRAMS,
    *[Case(f"ops.{name}", f"ops.{name}", "function", 32 * 32, table="functions") for name in FUNCTIONS.split()],
    Case("scalar, no gradient needed", "cube", "plain", targets=PLAIN),
    Case("100 elements, no gradient needed", "cube", "plain", 100, targets={"numpy": 1.7}),
    Case("scalar, forward", "cube", "forward", targets={"torch": 1.6}),
    Case("scalar, forward and backward", "cube", "gradient", targets=EAGER),
    Case("scalar, with a residual", "residual", "gradient", targets={**EAGER, "torch": 1.4}),
    Case("scalar, with a residual in a list", "in_a_list", "gradient", targets={"torch": 1.6}),
    Case("a keyword option", "option", "gradient", targets={"torch": 1.7}),
    Case("scalar, double backward", "cube", "second_order", targets=SECOND_ORDER),
    Case("double backward with a residual", "residual", "second_order", targets={"torch": 2.5}),
    Case("a training step of a small network", "square", "training_step", 16 * 32, targets={"torch": 1.15}),
    Case("100k elements, no gradient needed", "cube", "plain", 100_000, targets={"torch": 1.4, "numpy": 1.5}),
    Case("100k elements, forward and backward", "cube", "gradient", 100_000, targets=LARGE),
    Case("10M elements, forward and backward", "cube", "gradient", 10_000_000, targets=LARGE),
    Case("frozen weight of a 1024x1024 matmul", "matmul", "frozen_weight", 1024 * 1024, targets={"torch": 1.05}),
    Case("3 arguments", "positional", "gradient", width=3),
    Case("10 arguments", "positional", "gradient", width=10),
    Case("a method", "method", "gradient", targets={"torch": 1.6}),
    Case("three static leaves", "static", "gradient"),
    Case("three outputs", "three_outputs", "gradient"),
    Case("eight tensors in a nested dict", "tree", "gradient"),
    Case("the framework's grad", "cube", "func_grad", targets=FUNC),
    Case("vmap of grad, 100 scalars", "cube", "vmap_of_grad", 100, targets=FUNC),
    Case("compiled, 100k elements", "cube", "compiled", 100_000, targets=COMPILED),
    Case("compiled by XLA, 100k elements", "cube", "compiled_by_xla", 100_000, targets=COMPILED),
    Case("tracing", "cube", "tracing", targets={"jax": 1.25, "tensorflow": 0.9}),
    Case("tracing ten, no gradient", "cube", "tracing_forward", targets={"jax": 1.2}),
    Case("a rule given forward, no gradient", "given_forward", "plain"),
    Case("a rule given forward, jvp", "given_forward", "jvp", targets=FORWARD_MODE),
    Case("a rule given forward, gradient", "given_forward", "gradient", targets=TRANSPOSED),
    Case("a rule given forward, double backward", "given_forward", "second_order"),
    Case("a rule given forward, compiled", "given_forward", "compiled", 100_000, targets=COMPILED),
    Case("a rule given forward, tracing", "given_forward", "tracing"),
    Case("a known gradient", "embedded", "gradient", targets={"torch": 1.5}),
    Case("a known gradient, by a named op", "embedded_by_name", "gradient", targets={"torch": 1.5}),
    Case("1 leaf", "leaves", "gradient"),
    Case("10 leaves", "leaves", "gradient", width=10),
    Case("1000 leaves", "leaves", "gradient", width=1000, targets=WIDE),
    Case("10 levels deep", "nested", "gradient", width=10),
    Case("peak memory of four in a row", "cube", "chain", 10_000_000, targets=MEMORY, measured="peaks"),
    Case("peak memory with a residual", "residual", "chain", 10_000_000, targets=MEMORY, measured="peaks"),
    Case("peak memory, once differentiable", "residual_once", "chain", 10_000_000, targets=MEMORY, measured="peaks"),
    Case("peak memory under checkpoint", "residual", "checkpointed_chain", 10_000_000,
         targets=MEMORY, measured="peaks"),
    Case("on the host, scalar", "on_host", "plain", targets={"jax": 1.0}),
    Case("on the host, 1M elements", "on_host", "plain", 1_000_000, targets={"jax": 1.0, "torch": 1.05}),
    Case("on the host, compiled, scalar", "on_host", "compiled_plain",
         targets={"jax": 1.0, "torch": 1.4, "tensorflow": 1.05}),
    Case("on the host, compiled, 1M elements", "on_host", "compiled_plain", 1_000_000,
         targets={"jax": 1.0, "torch": 1.03, "tensorflow": 1.05}),
    Case("on the host, vmap over 1000 scalars", "on_host", "vmap", 1000, targets=VMAP_ON_HOST),
    Case("LU of 200 x 200 kept on the host, compiled, to plain NumPy", "solve", "compiled_pullback", width=200),
    Case("LU of 400 x 400 kept on the host, compiled, to plain NumPy", "solve", "compiled_pullback", width=400,
         targets=FACTORS_ON_HOST),
]  # fmt: skip

MILLISECONDS_OF_IMPORT = 10

OPS_OF_A_MODULE = 50
"""the ops of which one call each is measured in memory"""

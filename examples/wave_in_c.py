"""A simulator in C with its adjoint in C: ultrasound finds a body in water, eagerly and in compiled
code.

A ring of transducers surrounds the body. Each fires once, and all record what arrives. Gradient
descent looks for the speed of sound in each cell that explains the records. The simulator in wave.c
keeps the sound of all times on tapes, which grad_fn holds. Its adjoint sends the errors of the
records back in time, and reads the tapes.

With `--time` it measures what a gradient costs.
"""

import argparse
import collections
import ctypes
import importlib
import os
import shlex
import shutil
import subprocess
import tempfile
from pathlib import Path
from time import process_time
from timeit import repeat

import numpy as np
from _picture import panels

from cgshim import (
    Spec,
    config_backend,
    op_convert_to_numpy,
    op_convert_to_tensor,
    op_custom_gradient,
    op_sum,
    op_value_and_grad,
)

SIDE, TIMES, COUNT = 49, 110, 12  # cells on a side of the tank, times in a record, transducers
STEPS, RATE = 40, 0.01

ROW, COLUMN = np.indices((SIDE, SIDE)) - SIDE // 2
INSIDE = ROW**2 + COLUMN**2 < 17**2  # of the ring: there the body is looked for
ANGLES = 2 * np.pi * np.arange(COUNT) / COUNT
RING = [
    np.rint(SIDE // 2 + 20 * direction).astype("intc")
    for direction in (np.sin(ANGLES), np.cos(ANGLES))
]
TRANSDUCERS = SIDE * RING[0] + RING[1]
DELAY = np.arange(TIMES) / 4 - 3
PULSE = (1 - DELAY**2) * np.exp(-(DELAY**2) / 2)  # Ricker's wavelet


# --- The simulator --------------------------------------------------------------------------------


def compiled_c(source):
    """The functions of a C file, compiled for this process."""
    compiler = shlex.split(os.environ.get("CC", "cc"))
    if shutil.which(compiler[0]) is None:
        raise SystemExit(f"{source.name}: a C compiler must translate it, got none by the name of {compiler[0]}; "
                         "install one, or name yours in the environment variable CC")  # fmt: skip
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        library = Path(folder) / "library.so"
        subprocess.run([*compiler, "-O3", "-shared", "-fPIC", "-o", library, source], check=True)
        return ctypes.CDLL(str(library))


WAVE = compiled_c(Path(__file__).parent / "wave.c")
SIZES, INTS, DOUBLES = (
    [ctypes.c_int] * 3,
    np.ctypeslib.ndpointer("intc"),
    np.ctypeslib.ndpointer("float64", flags="C"),
)
WAVE.simulate.argtypes = [*SIZES, DOUBLES, INTS, DOUBLES, DOUBLES, DOUBLES]
WAVE.adjoint.argtypes = [*SIZES, DOUBLES, INTS, DOUBLES, DOUBLES, DOUBLES, DOUBLES]
runs = collections.Counter()


# the tapes take 26 MB
@op_custom_gradient(host_outputs=lambda m: Spec((COUNT, TIMES, COUNT), m.dtype), keep=1)
def recorded(m):
    """What each transducer hears at each time, for each one that fires; m is the square of the
    speed in wave.c.
    """
    m = np.asarray(m, "float64")
    records, tapes = np.zeros((COUNT, TIMES, COUNT)), np.zeros((COUNT, TIMES + 2, SIDE * SIDE))
    WAVE.simulate(SIDE, TIMES, COUNT, m, TRANSDUCERS, PULSE, records, tapes)
    runs["simulator"] += 1

    def grad_fn(upstream):
        gradient, room = np.zeros((SIDE, SIDE)), np.zeros((TIMES + 2, SIDE * SIDE))
        WAVE.adjoint(
            SIDE,
            TIMES,
            COUNT,
            m,
            TRANSDUCERS,
            tapes,
            np.asarray(upstream, "float64"),
            room,
            gradient,
        )
        runs["adjoint"] += 1
        return gradient

    return records, grad_fn


# --- The search -----------------------------------------------------------------------------------


def sound(speed):
    """The records for the speed in each cell, where 1 is that of water: half a cell in each step of
    time.
    """
    return recorded((0.5 * speed) ** 2)


def misfit(speed, observed):
    return op_sum((sound(speed) - observed) ** 2)


def water():
    return np.ones((SIDE, SIDE), "float32")


def body():
    """A body in water, with something slow and something fast in it."""
    speed = water()
    speed[(ROW / 14) ** 2 + (COLUMN / 11) ** 2 < 1] = 1.06
    speed[(ROW + 4) ** 2 + (COLUMN + 3) ** 2 < 4**2] = 0.95
    speed[(ROW - 5) ** 2 + (COLUMN - 4) ** 2 < 3**2] = 1.12
    return speed


def search(observed, value_and_grad):
    """The speed that explains the records, by Nesterov's accelerated gradient descent from water."""
    speed = ahead = op_convert_to_tensor(water())
    rates = op_convert_to_tensor(RATE * INSIDE, "float32")
    for at in range(STEPS):
        _, gradient = value_and_grad(ahead, observed)
        last, speed = speed, ahead - rates * gradient
        ahead = speed + at / (at + 3) * (speed - last)
    return op_convert_to_numpy(speed)


COMPILERS = {
    "numpy": lambda _, fn: op_value_and_grad(fn),  # NumPy compiles nothing
    "jax": lambda jax, fn: jax.jit(op_value_and_grad(fn)),
    "torch": lambda torch, fn: op_value_and_grad(torch.compile(fn, fullgraph=True)),
    "tensorflow": lambda tensorflow, fn: tensorflow.function(op_value_and_grad(fn)),
}


def compiled_value_and_grad(fn):
    """op_value_and_grad of a function in code that the framework compiles."""
    framework = config_backend()
    return COMPILERS[framework](importlib.import_module(framework), fn)


def main(picture=None):
    truth, observed = body(), sound(op_convert_to_tensor(body()))
    runs.clear()
    ways = {"eager": op_value_and_grad(misfit), "compiled": compiled_value_and_grad(misfit)}
    found = {
        f"{STEPS} steps, {name}": search(observed, value_and_grad)
        for name, value_and_grad in ways.items()
    }
    counts = f"runs in {2 * STEPS} steps: {runs['simulator']} of the simulator, {runs['adjoint']} of its adjoint"

    print("                      misfit  speed off by")
    for name, speed in {"water": water(), **found}.items():
        unexplained = float(op_convert_to_numpy(misfit(op_convert_to_tensor(speed), observed)))
        print(f"{name:20}{unexplained:8.4f}{np.sqrt(np.mean((speed - truth)[INSIDE] ** 2)):14.2%}")
    print(counts)
    if picture:
        draw(truth, found[f"{STEPS} steps, compiled"], picture)


def measure():
    """Print the time that the gradient by the speeds inside the ring takes from the processor."""
    speed, observed = op_convert_to_tensor(water()), sound(op_convert_to_tensor(body()))
    cells = np.eye(SIDE**2, dtype="float32")[INSIDE.ravel()].reshape(-1, SIDE, SIDE)
    moved = [speed, *(op_convert_to_tensor(water() + 0.01 * cell) for cell in cells)]
    ways = {
        "misfit": (20, lambda: op_convert_to_numpy(misfit(speed, observed))),
        "with its gradient, by the adjoint": (
            20,
            lambda: op_value_and_grad(misfit)(speed, observed),
        ),
        "by finite differences": (
            1,
            lambda: [op_convert_to_numpy(misfit(each, observed)) for each in moved],
        ),
    }
    print(f"{len(cells)} speeds")
    for name, (times, fn) in ways.items():
        print(
            f"{name:34}{1000 * min(repeat(fn, timer=process_time, number=1, repeat=times)):8.1f} ms"
        )


def draw(truth, found, path):
    images = {"the body": truth, "the first guess: water": water(), f"after {STEPS} steps": found}
    styles = ["-", ":", "--"]
    with panels(path, 4) as (*maps, right):
        for (name, image), axis, style in zip(images.items(), maps, styles, strict=True):
            shown = axis.imshow(image, vmin=0.94, vmax=1.13)
            axis.plot(*RING[::-1], "w.")
            axis.set(title=name, xticks=[], yticks=[])
            right.plot(
                op_convert_to_numpy(sound(op_convert_to_tensor(image)))[0, :, COUNT // 2],
                style,
                label=name,
            )
        axis.figure.colorbar(shown, ax=maps, label="speed of sound (water: 1)")
        right.set(title="what arrives on the other side", xlabel="time", xlim=(60, TIMES))
        right.legend()


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--picture", metavar="PATH", help="save a picture here (needs matplotlib)")
    parser.add_argument("--time", action="store_true", help="measure what a gradient costs")
    chosen = parser.parse_args()
    measure() if chosen.time else main(chosen.picture)

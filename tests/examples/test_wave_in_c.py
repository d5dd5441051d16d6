"""The simulator in C: its adjoint by differences, one run of each in a step, and what is said
without a compiler.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
from test_cookbook import IN_DYNAMO

from cgshim import op_convert_to_numpy, op_convert_to_tensor, op_value_and_grad
from cgshim.testing import check_gradients

EXAMPLE = Path(__file__).parents[2] / "examples" / "wave_in_c.py"


def test_the_adjoint_in_c():
    """With walls and transducers close together, so that sound comes back from all sides."""
    from wave_in_c import WAVE

    side, times, transducers, generator = (
        7,
        20,
        np.array([9, 23, 39], "intc"),
        np.random.default_rng(0),
    )
    m, change = generator.uniform(0.1, 0.4, (2, side, side))
    pulse, upstream = generator.normal(size=times), generator.normal(size=(3, times, 3))

    def simulated(m):
        records, tapes = np.zeros((3, times, 3)), np.zeros((3, times + 2, side * side))
        WAVE.simulate(side, times, 3, m, transducers, pulse, records, tapes)
        return records, tapes

    gradient, room = np.zeros((side, side)), np.zeros((times + 2, side * side))
    WAVE.adjoint(side, times, 3, m, transducers, simulated(m)[1], upstream, room, gradient)
    ahead, behind = (np.sum(upstream * simulated(m + step * change)[0]) for step in (1e-6, -1e-6))
    np.testing.assert_allclose(np.sum(gradient * change), (ahead - behind) / 2e-6, rtol=1e-6)


def test_the_gradient_of_the_op():
    from wave_in_c import body, recorded

    check_gradients(recorded, [op_convert_to_tensor(0.25 * body() ** 2, "float64")], order=1)


@IN_DYNAMO
def test_a_step_runs_the_simulator_once_and_its_adjoint_once():
    from wave_in_c import body, compiled_value_and_grad, misfit, runs, sound, water

    observed, speed = sound(op_convert_to_tensor(body())), op_convert_to_tensor(water())
    found = []
    for value_and_grad in (op_value_and_grad(misfit), compiled_value_and_grad(misfit)):
        for _ in range(2):  # the first call compiles
            runs.clear()
            parts = [op_convert_to_numpy(part) for part in value_and_grad(speed, observed)]
            assert runs == {"simulator": 1, "adjoint": 1}
        found.append(parts)
    (value, gradient), (compiled_value, compiled_gradient) = found
    np.testing.assert_allclose(compiled_value, value, rtol=1e-5)
    np.testing.assert_allclose(compiled_gradient, gradient, rtol=1e-4, atol=1e-5)


def test_what_a_gradient_costs(monkeypatch, capsys):
    import wave_in_c

    monkeypatch.setattr(wave_in_c, "INSIDE", wave_in_c.ROW**2 + wave_in_c.COLUMN**2 < 4**2)
    wave_in_c.measure()
    speeds, _, by_adjoint, by_differences = map(
        float, re.findall(r"\d+\.?\d*", capsys.readouterr().out)
    )
    assert speeds == 45
    assert by_adjoint < by_differences / 4


def test_a_missing_compiler(backend):
    environment = {**os.environ, "CGSHIM_BACKEND": backend, "CC": "no-such-compiler -g"}
    run = subprocess.run(
        [sys.executable, EXAMPLE], env=environment, capture_output=True, text=True, check=False
    )
    assert run.returncode == 1
    assert run.stderr.splitlines()[-1] == (
        "wave.c: a C compiler must translate it, got none by the name of no-such-compiler; "
        "install one, or name yours in the environment variable CC"
    )

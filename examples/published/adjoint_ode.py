"""The solution of a differential equation, with its gradient by the adjoint equation (Chen et al.
2018). Published as OdeintAdjointMethod in rtqichen/torchdiffeq, `torchdiffeq/_impl/adjoint.py`.
"""

from cgshim import op_custom_gradient, op_vjp, ops


def integrate(slope, state, start, end, steps):
    """The state, a tree of tensors, at the end, by Runge and Kutta's method of order 4."""
    h = (end - start) / steps
    moved = lambda state, h, slopes: ops.tree_map(lambda x, k: x + h * k, state, slopes)
    mean = lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6
    for at in range(steps):
        t = start + at * h
        a = slope(t, state)
        b = slope(t + h / 2, moved(state, h / 2, a))
        c = slope(t + h / 2, moved(state, h / 2, b))
        d = slope(t + h, moved(state, h, c))
        state = moved(state, h, ops.tree_map(mean, a, b, c, d))
    return state


@op_custom_gradient
def odeint(slope, parameters, y, times, *, steps=20):
    """The states [time, ...] of y' = slope(parameters, time, y), from y at the first time."""
    constants, t, *path = ops.tree_map(ops.stop_gradient, [parameters, times, y])
    forward = lambda t, y: slope(constants, t, y)  # of constants: nothing records the steps
    for at in range(1, t.shape[0]):
        path.append(integrate(forward, path[-1], t[at - 1], t[at], steps))
    path = ops.stack(path)

    def adjoint(t, state):
        change, pullback = op_vjp(lambda by, y: slope(by, t, y), parameters, state[0])
        return change, *pullback(-state[2])

    def grad(upstream):
        flow = lambda at, of_y: ops.sum(of_y * slope(parameters, times[at], path[at]))
        of_parameters, of_y, *of_times = ops.tree_map(ops.zeros_like, [parameters, y])
        for at in range(times.shape[0] - 1, 0, -1):
            of_times = [flow(at, upstream[at]), *of_times]
            end = path[at], of_parameters, of_y + upstream[at]
            _, of_parameters, of_y = integrate(adjoint, end, times[at], times[at - 1], steps)
        return None, of_parameters, of_y + upstream[0], ops.stack([-flow(0, of_y), *of_times])

    return path, grad

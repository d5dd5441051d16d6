"""tinygrad: the gradient of any function."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from tinygrad import Tensor

from cgshim_tinygrad._tensors import copied, flattened, is_float, on_device, refusal_in, zeros_like


def vjp(
    fn: Callable[..., Sequence[Tensor]], inputs: Sequence[Tensor], /
) -> tuple[Sequence[Tensor], Callable[[Sequence[Tensor]], Sequence[Tensor]]]:
    copies = [copied(x) for x in inputs]
    # an op's f may return these, and its rule then reads others
    outputs = [Tensor(y.uop) for y in fn(*copies)]
    places = [at for at, y in enumerate(outputs) if is_float(y)]

    def pullback(upstreams: Sequence[Tensor]) -> list[Tensor]:
        if not places:
            return [zeros_like(x) for x in copies]
        value = flattened([outputs[at] for at in places])
        upstream = flattened([upstreams[at] for at in places]).cast(value.dtype)
        gradients = value.gradient(*copies, gradient=upstream)
        for refuse in filter(None, map(refusal_in, gradients)):
            refuse()
        return [on_device(g) for g in gradients]

    return [Tensor(y.uop) for y in outputs], pullback

"""Parameters as a GradientReducer is given them: what it accepts, and what ranks compare."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor
from torch.nn.parameter import is_lazy

from hvd_strategy.arguments import require

# Complex gradients travel as twice as many floats.
WIRE_NAMES = {
    torch.float32: ("float32", 1),
    torch.float64: ("float64", 1),
    torch.float16: ("float16", 1),
    torch.bfloat16: ("bfloat16", 1),
    torch.complex64: ("float32", 2),
    torch.complex128: ("float64", 2),
}

# Shape, dtype, and strides of the gradient.
Form = tuple[tuple[int, ...], torch.dtype, tuple[int, ...]]


def unique(named_parameters: Iterable[tuple[str, Tensor]]) -> list[tuple[str, Tensor]]:
    """Checks the pairs and drops repetitions of tied parameters."""
    if not isinstance(named_parameters, Iterable):
        raise TypeError(
            f"named_parameters={named_parameters!r} is not accepted: it takes pairs of a name and "
            "a parameter, as model.named_parameters() gives."
        )
    named: dict[int, tuple[str, Tensor]] = {}
    names: dict[str, int] = {}
    for pair in named_parameters:
        fits = isinstance(pair, (tuple, list)) and len(pair) == 2
        if not fits or not isinstance(pair[0], str) or not isinstance(pair[1], Tensor):
            raise TypeError(
                f"named_parameters gave {type(pair).__name__}, which is not accepted: it takes "
                "pairs of a name and a parameter, as model.named_parameters() gives."
            )
        name, parameter = pair
        if is_lazy(parameter):
            raise ValueError(
                f"named_parameters gave '{name}', which is not accepted: it takes initialized "
                "parameters. Run a forward with a sample batch first, so that lazy modules know "
                "their shapes."
            )
        if parameter.is_meta:
            raise ValueError(
                f"named_parameters gave '{name}' on the meta device, which is not accepted: it "
                "takes parameters with memory. Materialize the model first, with "
                "model.to_empty(device='cpu') and its initialization."
            )
        if not parameter.is_leaf:
            raise ValueError(
                f"'{name}' is not a parameter but the result of a computation: it gets no "
                "gradient of its own."
            )
        if names.setdefault(name, id(parameter)) != id(parameter):
            raise ValueError(f"Two different parameters are called '{name}'.")
        named.setdefault(id(parameter), (name, parameter))
    return list(named.values())


def names_of(parameters: Iterable[Tensor], named: list[tuple[str, Tensor]]) -> list[str]:
    """Names of the parameters of the argument `full_precision`."""
    accepts = "parameters that are among named_parameters"
    fits = isinstance(parameters, Iterable) and not isinstance(parameters, (str, Tensor))
    require(fits, "full_precision", parameters, accepts)
    known = {id(parameter): name for name, parameter in named}
    names = []
    for parameter in parameters:
        require(id(parameter) in known, "full_precision", parameter, accepts)
        names.append(known[id(parameter)])
    return names


def form_of(name: str, parameter: Tensor) -> Form:
    """What has to be the same on all ranks for a gradient to be reduced.

    Raises:
        ValueError: The parameter is none whose gradient can be reduced.
    """
    if parameter.device.type != "cpu":
        raise ValueError(
            f"Parameter '{name}' is on {parameter.device}: only CPU tensors are supported so far. "
            "Train with accelerator='cpu'."
        )
    if parameter.layout is not torch.strided:
        raise ValueError(
            f"Parameter '{name}' is itself sparse ({parameter.layout}): only dense parameters are "
            "supported. Their gradients may be sparse."
        )
    return tuple(parameter.shape), parameter.dtype, gradient_strides(parameter)


def gradient_strides(parameter: Tensor) -> tuple[int, ...]:
    """The strides that autograd gives a gradient of the parameter."""
    return torch.empty_like(parameter, device="meta").stride()


def describe(name: str, form: Form) -> tuple[str, tuple[int, ...], str, tuple[int, ...]]:
    """Name and form of a parameter, as they travel between ranks."""
    shape, dtype, strides = form
    return name, shape, str(dtype), strides


def first_difference(
    reference: list[tuple[str, tuple[int, ...], str, Any]],
    rank: int,
    other: list[tuple[str, tuple[int, ...], str, Any]],
) -> str:
    """In words, where rank 0's descriptions and another rank's differ."""
    known = {name: (shape, dtype, strides) for name, shape, dtype, strides in reference}
    theirs = {name: (shape, dtype, strides) for name, shape, dtype, strides in other}
    for name in sorted(known.keys() | theirs.keys()):
        if name not in theirs:
            return f"Rank {rank} lacks '{name}', which rank 0 has"
        if name not in known:
            return f"Rank 0 lacks '{name}', which rank {rank} has"
        if known[name] != theirs[name]:
            return (
                f"'{name}' has shape {known[name][0]}, {known[name][1]} and strides "
                f"{known[name][2]} on rank 0, but shape {theirs[name][0]}, {theirs[name][1]} and "
                f"strides {theirs[name][2]} on rank {rank}"
            )
    return f"Rank {rank} names them in another way than rank 0"


def may_be_lazy(parameter: Tensor) -> bool:
    """Whether a gradient may be one whose memory has yet to be conjugated or negated.

    Such a real one has gaps, so autograd copies it, unless it is a single number.
    """
    return parameter.is_complex() or parameter.numel() == 1


def zeros(parameter: Tensor) -> Tensor:
    """A gradient that adds nothing, with the strides that autograd gives one."""
    return torch.zeros_like(parameter.detach(), memory_format=torch.preserve_format)

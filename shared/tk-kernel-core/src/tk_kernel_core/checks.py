"""Argument checks whose messages name the argument, what was wanted and what came."""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from typing import TypeVar

import torch

ACTIVATION_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""Element types every kernel takes for activations."""

# Numbers reach kernels in fp32.
_LARGEST = torch.finfo(torch.float32).max

ChoiceT = TypeVar("ChoiceT")


def check_tensor(name: str, value: object, dtypes: Iterable[torch.dtype] = ACTIVATION_DTYPES) -> torch.Tensor:
    """Return `value` if it is a dense tensor of one of the dtypes.

    Raises:
        TypeError: It is no tensor, not dense, or of another dtype.
    """
    if not isinstance(value, torch.Tensor):
        raise TypeError(f"{name} must be a torch.Tensor, got {type(value).__name__}")
    if value.layout is not torch.strided:
        raise TypeError(f"{name} must be a dense (strided) tensor, got layout {value.layout}")
    allowed = tuple(dtypes)
    if value.dtype not in allowed:
        wanted = ", ".join(str(dtype).removeprefix("torch.") for dtype in allowed)
        raise TypeError(f"{name} must have dtype {wanted}, got {str(value.dtype).removeprefix('torch.')}")
    return value


def check_shape(name: str, value: torch.Tensor, shape: Sequence[int]) -> None:
    """Raise ValueError unless the tensor has this shape."""
    if tuple(value.shape) != tuple(shape):
        raise ValueError(f"{name} must have shape {tuple(shape)}, got {tuple(value.shape)}")


def check_same_device(name: str, value: torch.Tensor, device: torch.device, owner: str) -> None:
    """Raise ValueError unless the tensor is on the device of the argument called `owner`."""
    if value.device != device:
        raise ValueError(f"{name} must be on the device of {owner}, {device}, got {value.device}")


def check_number(name: str, value: object, *, minimum: float = -math.inf) -> float:
    """Return a finite real number as a float.

    Raises:
        TypeError: It is not an int or float.
        ValueError: It is not finite, lies below `minimum`, or is too large for float32.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise TypeError(f"{name} must be a number, got {type(value).__name__}")
    try:
        number = float(value)
    except OverflowError:
        number = math.inf if value > 0 else -math.inf
    # Comparisons, which torch.compile traces where the number is an input of the graph; NaN fails them.
    if sys.float_info.max >= abs(number) > _LARGEST:
        raise ValueError(f"{name} must be within the range of float32, got {number:g}")
    if not max(minimum, -_LARGEST) <= number <= _LARGEST:
        wanted = "finite" if minimum == -math.inf else f"finite and at least {minimum:g}"
        raise ValueError(f"{name} must be {wanted}, got {number:g}")
    return number


def check_choice(name: str, value: ChoiceT, choices: Iterable[ChoiceT]) -> ChoiceT:
    """Return `value` if it is one of the choices, else raise ValueError."""
    allowed = tuple(choices)
    if value not in allowed:
        raise ValueError(f"{name} must be one of {', '.join(map(repr, allowed))}, got {value!r}")
    return value


def check_writable(name: str, value: torch.Tensor) -> None:
    """Raise ValueError unless every element of the tensor certainly has memory of its own."""
    reach = 0
    for stride, size in sorted(zip(value.stride(), value.shape, strict=True)):
        if size > 1:
            if stride <= reach and value.numel():
                raise ValueError(
                    f"{name} is written in place and must not be expanded or overlap itself: shape "
                    f"{tuple(value.shape)}, strides {value.stride()} let several elements share memory"
                )
            reach += (size - 1) * stride

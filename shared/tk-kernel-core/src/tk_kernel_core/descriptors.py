"""Tensors that a kernel reads block by block through a descriptor, which on NVIDIA GPUs from Hopper on is TMA's.

Triton makes one on the host, as an argument of the kernel. The `blocks` of a `PreparedLaunch` say which tensors those
are.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


def through_descriptors(
    tensors: Sequence[Any], names: Sequence[str], blocks: Mapping[str, tuple[int, ...]]
) -> tuple[Any, ...]:
    """Put a descriptor in the place of each tensor that a kernel reads through one.

    Args:
        tensors: The kernel's tensor arguments.
        names: Their names.
        blocks: As in `PreparedLaunch`.
    """
    if not blocks:
        return tuple(tensors)
    from triton.tools.tensor_descriptor import TensorDescriptor

    return tuple(
        TensorDescriptor(tensor, list(tensor.shape), _strides(tensor), list(blocks[name])) if name in blocks else tensor
        for name, tensor in zip(names, tensors, strict=False)
    )


def _strides(tensor: torch.Tensor) -> list[int]:
    """Return the strides, for dimensions of size 1, whose stride may be anything, those of whole 16 bytes."""
    strides, unit, reach = [], 16 // tensor.element_size(), 1
    for size, stride in zip(reversed(tensor.shape), reversed(tensor.stride()), strict=True):
        strides.append(reach if size == 1 else stride)
        reach = -(-size * strides[-1] // unit) * unit
    return strides[::-1]


_Described = tuple[int, Callable[[int], Any]]


def launch_by_address(compiled: Any, arguments: Sequence[Any]) -> tuple[Any, list[_Described]]:
    """Return the launcher of a kernel that takes addresses, and what it takes for descriptors.

    Args:
        compiled: A loaded kernel.
        arguments: What it was launched with, tensors and descriptors first.

    Returns:
        The launcher; and, from the last descriptor on, its position and a function from the tensor's address to the
        launcher's arguments.
    """
    from triton.backends.nvidia.driver import make_tensordesc_arg

    launch = compiled.run.launch
    descriptors = [(position, value) for position, value in enumerate(arguments) if hasattr(value, "block_shape")]
    if not descriptors:
        return launch, []
    # Triton's wrapper around it encodes every descriptor anew in every call.
    launch = inspect.getclosurevars(launch).nonlocals["launcher"]
    encodings = compiled.metadata.tensordesc_meta or [None] * len(descriptors)

    def arguments_by_address(descriptor: Any, encoding: Any) -> Callable[[int], Any]:
        # Not the descriptor itself, which would keep its tensor alive.
        layout = {"shape": list(descriptor.shape), "strides": list(descriptor.strides), "padding": descriptor.padding}

        # It says where a tensor lies and how, nothing of what it holds: good for whichever tensor lies there next.
        @functools.lru_cache(maxsize=64)
        def of_address(address: int) -> Any:
            return make_tensordesc_arg(SimpleNamespace(base=_Address(address), **layout), encoding)

        return of_address

    described = [
        (position, arguments_by_address(descriptor, encoding))
        for (position, descriptor), encoding in zip(descriptors, encodings, strict=True)
    ]
    return launch, described[::-1]


@dataclass(frozen=True, slots=True)
class _Address:
    """What Triton asks of a tensor."""

    address: int

    def data_ptr(self) -> int:
        return self.address

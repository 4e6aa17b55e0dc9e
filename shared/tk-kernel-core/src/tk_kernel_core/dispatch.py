"""Which implementation serves a tensor: the Triton kernel or the PyTorch reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from tk_kernel_core import launch
from tk_kernel_core.interpreter import interpreting

if TYPE_CHECKING:
    import torch

Backend = Literal["triton", "reference"]


def backend_of(name: str, tensor: torch.Tensor) -> Backend:
    """Return the backend that serves a tensor.

    Args:
        name: Argument name for the error message.
        tensor: Any tensor.

    Returns:
        `triton` for CUDA and HIP tensors, for CPU tensors while the Triton interpreter is on, and for meta
        tensors while launches are planned; `reference` for other CPU and meta tensors.

    Raises:
        ValueError: The tensor lives on a device that neither serves.
    """
    kind = tensor.device.type
    if kind == "cuda" or (kind == "meta" and launch.is_planning()):
        return "triton"
    if kind == "meta":
        return "reference"
    if kind == "cpu":
        return "triton" if interpreting() else "reference"
    raise ValueError(f"{name} must be on a CUDA, HIP or CPU device, got {tensor.device}")

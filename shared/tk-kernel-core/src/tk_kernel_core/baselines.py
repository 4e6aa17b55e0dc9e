"""Baselines that several kernel packages share."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from tk_kernel_core.launch import Kernel, PreparedLaunch
from tk_kernel_core.spec import BaselineUnavailable, Inputs

_COPY = Kernel("tk_kernel_core._kernels", "copy_kernel")
_COPY_BLOCK = 2048


def copy(a: torch.Tensor, b: torch.Tensor | None = None) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Copy one or two tensors of the same size by a plain Triton kernel: the practical roof of memory traffic.

    Args:
        a: Any contiguous CUDA or HIP tensor.
        b: Another one with as many elements, or None.

    Raises:
        BaselineUnavailable: The tensors are not on a GPU.
    """
    _require_gpu(a)
    out_a, out_b = torch.empty_like(a), None if b is None else torch.empty_like(b)
    _prepared_copy(a.numel(), a.device, a.dtype, None if b is None else b.dtype)(out_a, out_b, a, b)
    return out_a, out_b


@functools.lru_cache(maxsize=64)
def _prepared_copy(n_elements: int, device: torch.device, *dtypes: torch.dtype | None) -> PreparedLaunch:
    # A prepared launch serves one combination of dtypes.
    grid = (-(-n_elements // _COPY_BLOCK), 1, 1)
    return PreparedLaunch(_COPY, grid, (n_elements,), {"BLOCK": _COPY_BLOCK}, device, num_warps=8)


def compiled(formula: Callable[[Inputs], Any]) -> Callable[[Inputs], Any]:
    """Return the baseline `torch.compile(formula)`, compiled for the shapes at hand alone.

    On a CPU it raises BaselineUnavailable: compiling takes longer than everything else there, and its time
    would say nothing about a GPU.
    """
    shapes: object = None
    function = formula

    def run(inputs: Inputs) -> Any:
        nonlocal shapes, function
        tensors = [value for value in inputs.values() if isinstance(value, torch.Tensor)]
        _require_gpu(*tensors)
        current = [(tensor.shape, tensor.stride(), tensor.dtype) for tensor in tensors]
        if current != shapes:
            # Otherwise torch.compile would give up after a few shapes.
            torch.compiler.reset()
            shapes, function = current, torch.compile(formula, dynamic=False, fullgraph=True)
        return function(inputs)

    return run


def _require_gpu(*tensors: torch.Tensor) -> None:
    if not all(tensor.is_cuda for tensor in tensors):
        raise BaselineUnavailable("this baseline is timed on a GPU only")

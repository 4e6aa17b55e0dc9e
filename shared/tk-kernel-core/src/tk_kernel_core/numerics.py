"""How far a kernel may lie from its reference, from the dtype and the length of the sum alone."""

from __future__ import annotations

import math

import torch

from tk_kernel_core.spec import Tolerance


def rounding_tolerance(dtype: torch.dtype, terms: int, *, roundings: int = 1, magnitude: float = 0.0) -> Tolerance:
    """Return the tolerance of a result that was summed in fp32 and rounded to `dtype`.

    Both sides are rounded, so each rounding may move them one unit in the last place apart. A sum of n fp32
    terms taken in a tree, as a GPU takes it, errs by about sqrt(n) units of fp32; 4 covers the products and
    the final operations around it.

    Args:
        dtype: Element type of the result.
        terms: Number of terms in the longest sum behind one element.
        roundings: How often a value is rounded to `dtype` on its way.
        magnitude: Size of the terms where they cancel, so that the result may be much smaller than they are.
    """
    kind = torch.finfo(dtype)
    summing = (4 + math.sqrt(terms)) * torch.finfo(torch.float32).eps
    rounding = 0.0 if dtype == torch.float32 else roundings * kind.eps
    return Tolerance(
        absolute=roundings * kind.smallest_normal * kind.eps + magnitude * summing, relative=rounding + summing
    )

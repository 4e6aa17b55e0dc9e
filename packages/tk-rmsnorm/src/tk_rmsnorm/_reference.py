"""The same mathematics in PyTorch: the CPU path without Triton, and the ground truth of the tests."""

from __future__ import annotations

import torch


def _compute_dtype(x: torch.Tensor) -> torch.dtype:
    return torch.float64 if x.dtype == torch.float64 else torch.float32


def rmsnorm_torch(
    x: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: str = "fp32",
) -> torch.Tensor:
    """RMSNorm over the last dimension by PyTorch operations, in fp32 (fp64 for a float64 `x`).

    `y = x * rsqrt(mean(x^2) + eps) * (weight + weight_offset)`

    Args:
        x: [..., hidden_size].
        weight: [hidden_size], or None for ones.
        eps: Added to the mean square.
        weight_offset: Added to the weight; 1.0 for Gemma.
        casting: `fp32` rounds once, at the end; `llama` rounds the normalised value to `x.dtype` first.

    Returns:
        A tensor like `x`.
    """
    return _normalise(x.to(_compute_dtype(x)), x.dtype, weight, eps, weight_offset, casting)


def fused_add_rmsnorm_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: str = "fp32",
) -> tuple[torch.Tensor, torch.Tensor]:
    """RMSNorm of `x + residual`, and that sum, by PyTorch operations.

    The norm takes the unrounded sum; the returned sum is rounded once, to `residual.dtype`.

    Args:
        x: [..., hidden_size].
        residual: Same shape as `x`.
        weight: [hidden_size], or None for ones.
        eps: Added to the mean square.
        weight_offset: Added to the weight.
        casting: As for `rmsnorm_torch`.

    Returns:
        `(y, new_residual)`, with the dtypes of `x` and of `residual`.
    """
    compute = _compute_dtype(x)
    total = x.to(compute) + residual.to(compute)
    return _normalise(total, x.dtype, weight, eps, weight_offset, casting), total.to(residual.dtype)


def rmsnorm_residual_torch(
    x: torch.Tensor,
    residual: torch.Tensor,
    weight: torch.Tensor | None = None,
    eps: float = 1e-6,
    *,
    weight_offset: float = 0.0,
    casting: str = "fp32",
) -> torch.Tensor:
    """RMSNorm of `x + residual` by PyTorch operations: the first result of `fused_add_rmsnorm_torch`."""
    return fused_add_rmsnorm_torch(x, residual, weight, eps, weight_offset=weight_offset, casting=casting)[0]


def _normalise(
    value: torch.Tensor,
    dtype: torch.dtype,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> torch.Tensor:
    normed = value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    if casting == "llama":
        normed = normed.to(dtype).to(value.dtype)
    if weight is not None:
        normed = normed * (weight.to(value.dtype) + weight_offset)
    return normed.to(dtype)


def rmsnorm_backward_torch(
    dy: torch.Tensor,
    dsum: torch.Tensor | None,
    x: torch.Tensor,
    weight: torch.Tensor | None,
    eps: float,
    weight_offset: float,
    casting: str,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of `rmsnorm_torch` by PyTorch operations, which PyTorch can differentiate again.

    With `n = x * rsqrt(mean(x^2) + eps)` and `dyw = dy * (weight + weight_offset)`:
    `dx = rsqrt(mean(x^2) + eps) * (dyw - n * mean(dyw * n)) + dsum`, `dweight = sum over rows of dy * n`.

    Args:
        dy: Gradient of the result, [..., hidden_size].
        dsum: A further gradient that reaches `x`, same shape, or None.
        x: What was normalised, [..., hidden_size].
        weight: [hidden_size], or None.
        eps: As in the forward call.
        weight_offset: As in the forward call.
        casting: As in the forward call.

    Returns:
        `(dx, dweight)` with the dtypes of `x` and `weight`; `dweight` is None where there is no weight.
    """
    compute = _compute_dtype(x)
    value, gradient = x.to(compute), dy.to(compute)
    rstd = torch.rsqrt(value.square().mean(-1, keepdim=True) + eps)
    normed = value * rstd
    scaled = gradient if weight is None else gradient * (weight.to(compute) + weight_offset)
    dx = rstd * (scaled - normed * (scaled * normed).mean(-1, keepdim=True))
    if dsum is not None:
        dx = dx + dsum.to(compute)
    if weight is None:
        return dx.to(x.dtype), None
    if casting == "llama":
        normed = normed.to(dy.dtype).to(compute)
    return dx.to(x.dtype), (gradient * normed).sum_to_size(weight.shape).to(weight.dtype)

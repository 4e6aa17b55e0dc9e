"""The same mathematics in PyTorch: the CPU path without Triton, and the ground truth of the tests."""

from __future__ import annotations

from typing import Any

import torch


def _compute_dtype(gate: torch.Tensor) -> torch.dtype:
    return torch.float64 if gate.dtype == torch.float64 else torch.float32


def swiglu_torch(
    gate: torch.Tensor,
    up: torch.Tensor,
    bias_gate: torch.Tensor | None = None,
    bias_up: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """SwiGLU by PyTorch operations, in fp32 (fp64 for a float64 `gate`).

    `y = g * sigmoid(alpha * g) * (u + beta)`, with g = gate + bias_gate clamped from above by `limit`, and
    u = up + bias_up clamped to [-limit, limit].

    Args:
        gate: [..., width].
        up: Same shape.
        bias_gate: [width], or None.
        bias_up: [width], or None.
        alpha: Slope inside the sigmoid.
        beta: Added to u.
        limit: Bound of the clamps, or None.

    Returns:
        A tensor like `gate`.
    """
    g, u = _summands(gate, up, bias_gate, bias_up)
    if limit is not None:
        g, u = g.clamp(max=limit), u.clamp(-limit, limit)
    return (g * torch.sigmoid(alpha * g) * _plus(u, beta)).to(gate.dtype)


def swiglu_packed_torch(
    x: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    layout: str = "concat",
    order: str = "gate_first",
    alpha: float = 1.0,
    beta: float = 0.0,
    limit: float | None = None,
) -> torch.Tensor:
    """`swiglu_torch` of the two halves of one tensor.

    Args:
        x: [..., 2 * width].
        bias: [2 * width], laid out like `x`, or None.
        layout: `concat`, one half after the other, or `interleaved`, their elements in turns.
        order: `gate_first` or `up_first`.
        alpha: As for `swiglu_torch`.
        beta: As for `swiglu_torch`.
        limit: As for `swiglu_torch`.

    Returns:
        [..., width], with the dtype of `x`.
    """
    parts = unpacked(x, None, bias, None, layout, order == "gate_first")
    return swiglu_torch(*parts, alpha=alpha, beta=beta, limit=limit)


def unpacked(
    gate: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    layout: str,
    gate_first: bool,
) -> list[Any]:
    """Return gate, up and their two biases: the arguments themselves (`separate`), or views of the halves."""
    if layout == "separate":
        return [gate, up, bias, bias_up]
    pairs: list[list[Any]] = []
    for tensor in (gate, bias):
        if tensor is None:
            pairs.append([None, None])
        else:
            pair = tensor.chunk(2, -1) if layout == "concat" else (tensor[..., ::2], tensor[..., 1::2])
            pairs.append([*pair] if gate_first else [*pair[::-1]])
    return pairs[0] + pairs[1]


def _pack(gate: torch.Tensor, up: torch.Tensor, layout: str, gate_first: bool) -> torch.Tensor:
    pair = (gate, up) if gate_first else (up, gate)
    return torch.cat(pair, -1) if layout == "concat" else torch.stack(pair, -1).flatten(-2)


def _plus(u: torch.Tensor, beta: float) -> torch.Tensor:
    # Adding 0 would turn -0 into 0.
    return u + beta if beta else u


def _summands(gate: torch.Tensor, up: torch.Tensor, bias_gate: Any, bias_up: Any) -> tuple[torch.Tensor, torch.Tensor]:
    compute = _compute_dtype(gate)
    g, u = gate.to(compute), up.to(compute)
    if bias_gate is not None:
        g = g + bias_gate.to(compute)
    if bias_up is not None:
        u = u + bias_up.to(compute)
    return g, u


def swiglu_backward_torch(
    dy: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor | None,
    bias: torch.Tensor | None,
    bias_up: torch.Tensor | None,
    layout: str,
    gate_first: bool,
    alpha: float,
    beta: float,
    limit: float | None,
) -> tuple[torch.Tensor | None, ...]:
    """Gradients of all forms by PyTorch operations, which PyTorch can differentiate again.

    With `s = sigmoid(alpha * g)`: `dg = dy * (u + beta) * s * (1 + alpha * g * (1 - s))` and `du = dy * g * s`,
    each zero where its clamp bit; summed over the rows they are the gradients of the biases.

    Args:
        dy: Gradient of the result, [..., width].
        gate: [..., width], or [..., 2 * width] where it is packed.
        up: [..., width], or None where it is packed.
        bias: [width], [2 * width] where it is packed, or None.
        bias_up: [width], or None.
        layout: `separate`, `concat` or `interleaved`.
        gate_first: Order of the halves, where they are packed.
        alpha: As in the forward call.
        beta: As in the forward call.
        limit: As in the forward call.

    Returns:
        The gradients of gate, up, bias and bias_up, with their dtypes; None for what is absent.
    """
    raw_g, raw_u = _summands(*unpacked(gate, up, bias, bias_up, layout, gate_first))
    g, u = (raw_g, raw_u) if limit is None else (raw_g.clamp(max=limit), raw_u.clamp(-limit, limit))
    # Further out the sigmoid is 0 or 1. Infinity times 0 is NaN: right for a g that is infinite, but not for one
    # whose product with alpha is.
    x = alpha * g
    x = torch.where(g.isfinite(), x.clamp(-200.0, 200.0), x)
    s = torch.sigmoid(x)
    dg = dy.to(g.dtype) * _plus(u, beta) * s * (1 + x * torch.sigmoid(-x))
    du = dy.to(g.dtype) * g * s
    if limit is not None:
        dg = torch.where(raw_g <= limit, dg, 0.0)
        du = torch.where(raw_u.abs() <= limit, du, 0.0)
    pair = (dg, du) if layout == "separate" else (_pack(dg, du, layout, gate_first), None)
    return tuple(
        None if tensor is None or gradient is None else gradient.sum_to_size(tensor.shape).to(tensor.dtype)
        for tensor, gradient in zip((gate, up, bias, bias_up), pair * 2, strict=True)
    )

"""Comparison of results with references."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from tk_kernel_core.spec import Tolerance


def assert_close(got: Any, want: Any, tolerance: Tolerance, label: str = "result") -> None:
    """Check |got - want| <= absolute + relative * |want|, element by element in float64.

    NaNs must stand at the same positions, infinities too and with the same sign.

    Args:
        got: Tensor, or a tuple or list of tensors, of the code under test.
        want: What it should be, of the same shapes and on the same devices. The dtypes must be the same, except
            that a `want` in float64 is a ground truth for any floating-point dtype.
        tolerance: The accepted difference, the same for all tensors.
        label: What is compared, for the message.

    Raises:
        AssertionError: They differ. The message counts the elements and shows the worst one.
    """
    if isinstance(want, (tuple, list)):
        if not isinstance(got, (tuple, list)) or len(got) != len(want):
            what = f"{len(got)} results" if isinstance(got, (tuple, list)) else type(got).__name__
            raise AssertionError(f"{label}: want {len(want)} results, got {what}")
        for index, (one, other) in enumerate(zip(got, want, strict=True)):
            assert_close(one, other, tolerance, f"{label}[{index}]")
        return
    for side, value in (("got", got), ("want", want)):
        if not isinstance(value, torch.Tensor):
            raise AssertionError(f"{label}: {side} must be a tensor, is {type(value).__name__}")
    _check_kind(got, want, label)
    _check_values(got.detach().to(torch.float64), want.detach().to(torch.float64), tolerance, label)


def _check_kind(got: torch.Tensor, want: torch.Tensor, label: str) -> None:
    is_ground_truth = want.dtype == torch.float64 and got.dtype.is_floating_point
    if got.dtype != want.dtype and not is_ground_truth:
        raise AssertionError(f"{label}: want dtype {want.dtype}, got {got.dtype}")
    if got.shape != want.shape:
        raise AssertionError(f"{label}: want shape {tuple(want.shape)}, got {tuple(got.shape)}")
    if got.device != want.device:
        raise AssertionError(f"{label}: want device {want.device}, got {got.device}")


def _check_values(got: torch.Tensor, want: torch.Tensor, tolerance: Tolerance, label: str) -> None:
    difference = (got - want).abs()
    allowed = tolerance.absolute + tolerance.relative * want.abs()
    same = (got == want) | (got.isnan() & want.isnan())
    # A comparison with NaN is false, and an infinite `want` would allow any difference.
    within = (difference <= allowed) & want.isfinite()
    wrong = ~(same | within)
    count = int(wrong.sum())
    if count == 0:
        return
    excess = torch.where(wrong, (difference - allowed).nan_to_num(nan=float("inf")), -float("inf"))
    flat = int(excess.argmax())
    index = tuple(int(i) for i in torch.unravel_index(torch.tensor(flat), want.shape))
    raise AssertionError(
        f"{label}: {count} of {want.numel()} elements differ by more than "
        f"{tolerance.absolute:.3g} + {tolerance.relative:.3g} * |want|; worst at {index}: "
        f"got {got[index].item():.9g}, want {want[index].item():.9g}, "
        f"difference {difference[index].item():.3g}, allowed {allowed[index].item():.3g}"
    )

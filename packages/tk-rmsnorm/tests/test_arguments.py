"""Bad arguments get an error that names the argument, what was wanted and what came."""

import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk_rmsnorm import fused_add_rmsnorm, fused_add_rmsnorm_, rmsnorm, rmsnorm_residual_fused

X, W = torch.ones(4, 8), torch.ones(8)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), TypeError, "x must be a torch.Tensor, got list"),
        ((None,), TypeError, "x must be a torch.Tensor, got NoneType"),
        ((X.double(),), TypeError, "x must have dtype float16, bfloat16, float32, got float64"),
        ((X.int(),), TypeError, "x must have dtype float16, bfloat16, float32, got int32"),
        ((X.to_sparse(),), TypeError, "x must be a dense (strided) tensor, got layout torch.sparse_coo"),
        ((torch.tensor(1.0),), ValueError, "x must have at least one dimension, got a scalar tensor"),
        ((X, "w"), TypeError, "weight must be a torch.Tensor, got str"),
        ((X, W.double()), TypeError, "weight must have dtype float16, bfloat16, float32, got float64"),
        ((X, W[:7]), ValueError, "weight must have shape (8,), got (7,)"),
        ((X, W[None]), ValueError, "weight must have shape (8,), got (1, 8)"),
        ((X, torch.ones(8, device="meta")), ValueError, "weight must be on the device of x, cpu, got meta"),
        ((X, W, "1e-6"), TypeError, "eps must be a number, got str"),
        ((X, W, None), TypeError, "eps must be a number, got NoneType"),
        ((X, W, torch.tensor(1e-6)), TypeError, "eps must be a number, got Tensor"),
        ((X, W, [1e-6]), TypeError, "eps must be a number, got list"),
        ((X, W, -1e-6), ValueError, "eps must be finite and at least 0, got -1e-06"),
        ((X, W, float("nan")), ValueError, "eps must be finite and at least 0, got nan"),
    ],
)
def test_norm(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        rmsnorm(*arguments)


def test_the_same_errors_where_a_gradient_is_wanted() -> None:
    x = X.clone().requires_grad_()
    for arguments, error, message in (
        ((x, "w"), TypeError, "weight must be a torch.Tensor, got str"),
        ((x, W, "1e-6"), TypeError, "eps must be a number, got str"),
        ((x, W, True), TypeError, "eps must be a number, got bool"),
        ((x, W[:7]), ValueError, "weight must have shape (8,), got (7,)"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            rmsnorm(*arguments)
    for function in (rmsnorm_residual_fused, fused_add_rmsnorm, fused_add_rmsnorm_):
        with pytest.raises(TypeError, match=r"residual must be a torch\.Tensor, got NoneType"):
            function(x, None)


@pytest.mark.parametrize("function", [rmsnorm_residual_fused, fused_add_rmsnorm, fused_add_rmsnorm_])
@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        ((X, None), TypeError, "residual must be a torch.Tensor, got NoneType"),
        ((X, X[:3].clone()), ValueError, "residual must have shape (4, 8), got (3, 8)"),
        ((X, X.double()), TypeError, "residual must have dtype float16, bfloat16, float32, got float64"),
        ((X, X.to("meta")), ValueError, "residual must be on the device of x, cpu, got meta"),
        ((X[0, 0], X[0, 0].clone()), ValueError, "x must have at least one dimension"),
        ((X, X.clone(), W[:3]), ValueError, "weight must have shape (8,), got (3,)"),
    ],
)
def test_with_residual(function: object, arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        function(*arguments)


@pytest.mark.parametrize("function", [rmsnorm, rmsnorm_residual_fused, fused_add_rmsnorm, fused_add_rmsnorm_])
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"weight_offset": "1"}, TypeError, "weight_offset must be a number, got str"),
        ({"weight_offset": float("inf")}, ValueError, "weight_offset must be finite, got inf"),
        ({"casting": "gemma"}, ValueError, "casting must be one of 'fp32', 'llama', got 'gemma'"),
        ({"casting": None}, ValueError, "casting must be one of 'fp32', 'llama', got None"),
    ],
)
def test_options(function: object, options: dict[str, object], error: type[Exception], message: str) -> None:
    tensors = (X,) if function is rmsnorm else (X.clone(), X.clone())
    with pytest.raises(error, match=re.escape(message)):
        function(*tensors, **options)


def test_in_place_refuses_memory_it_cannot_write_apart() -> None:
    x = X.clone()
    buffer, wide = torch.ones(9, 8), torch.ones(4, 16)
    for left, right in (
        (x, x),
        (x, x.view(4, 8)),
        (buffer[:4], buffer[1:5]),
        (buffer[1:5], buffer[:4]),
        (buffer[1:5], buffer[::2][:4]),
        (wide[:, :8], wide[:, 4:12]),
        (wide[:, 4:12], wide[:, :8]),
    ):
        with pytest.raises(ValueError, match="x and residual are both written in place and must not share memory"):
            fused_add_rmsnorm_(left, right)
    # Apart in one buffer, side by side and interleaved.
    sides = torch.ones(4, 16)
    fused_add_rmsnorm_(sides[:, :8], sides[:, 8:])
    fused_add_rmsnorm_(*torch.ones(2, 3, 16).chunk(2, -1))
    fused_add_rmsnorm_(*torch.ones(2, 4, 8))
    fused_add_rmsnorm_(torch.empty(0, 8), torch.empty(0, 8))
    with pytest.raises(ValueError, match="x is written in place and must not be expanded"):
        fused_add_rmsnorm_(torch.ones(1, 8).expand(4, 8), x)
    with pytest.raises(ValueError, match="x is written in place and must not be expanded or overlap itself"):
        fused_add_rmsnorm_(torch.ones(40).as_strided((4, 8), (4, 1)), X.clone())
    with pytest.raises(ValueError, match="residual is written in place and must not be expanded"):
        fused_add_rmsnorm_(x, torch.ones(1, 8).expand(4, 8))


@settings(max_examples=100)
@given(
    rows=st.integers(1, 4),
    hidden_size=st.integers(1, 5),
    pitches=st.tuples(*[st.integers(5, 12)] * 2),
    starts=st.tuples(*[st.integers(0, 40)] * 2),
)
def test_in_place_arguments_share_memory_property(
    rows: int, hidden_size: int, pitches: tuple[int, int], starts: tuple[int, int]
) -> None:
    buffer, addresses = torch.zeros(128), torch.arange(128)
    x, residual = (
        buffer.as_strided((rows, hidden_size), (pitch, 1), start) for pitch, start in zip(pitches, starts, strict=True)
    )
    left, right = (
        set(addresses.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist())
        for view in (x, residual)
    )
    try:
        fused_add_rmsnorm_(x, residual)
        refused = False
    except ValueError:
        refused = True
    if left & right:
        assert refused
    # Views with different pitches whose extents meet are refused without looking closer.
    elif pitches[0] == pitches[1] or max(left) < min(right) or max(right) < min(left):
        assert not refused


def test_an_error_leaves_in_place_arguments_alone() -> None:
    x, residual = X.clone(), X.clone()
    with pytest.raises(ValueError, match="weight"):
        fused_add_rmsnorm_(x, residual, W[:3])
    assert torch.equal(x, X)
    assert torch.equal(residual, X)


@pytest.mark.gpu
def test_mixed_devices_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="weight must be on the device of x, cuda:0, got cpu"):
        rmsnorm(X.cuda(), W)
    with pytest.raises(ValueError, match="residual must be on the device of x, cuda:0, got cpu"):
        fused_add_rmsnorm(X.cuda(), X)

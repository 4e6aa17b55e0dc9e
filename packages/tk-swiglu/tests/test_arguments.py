"""Bad arguments get an error that names the argument, what was wanted and what came."""

import re

import pytest
import torch

from tk_swiglu import swiglu_fused, swiglu_packed, swiglu_with_bias

G, B, X, XB = torch.ones(4, 8), torch.ones(8), torch.ones(4, 16), torch.ones(16)
ONLY = "must have dtype float16, bfloat16, float32, got"


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0], G), TypeError, "gate must be a torch.Tensor, got list"),
        ((None, G), TypeError, "gate must be a torch.Tensor, got NoneType"),
        ((G.double(), G), TypeError, f"gate {ONLY} float64"),
        ((G.int(), G), TypeError, f"gate {ONLY} int32"),
        ((G.to_sparse(), G), TypeError, "gate must be a dense (strided) tensor, got layout torch.sparse_coo"),
        ((torch.tensor(1.0),) * 2, ValueError, "gate must have at least one dimension, got a scalar tensor"),
        ((G, None), TypeError, "up must be a torch.Tensor, got NoneType"),
        ((G, 1.0), TypeError, "up must be a torch.Tensor, got float"),
        ((G, G.double()), TypeError, f"up {ONLY} float64"),
        ((G, G.to_sparse()), TypeError, "up must be a dense (strided) tensor, got layout torch.sparse_coo"),
        ((G, G[:3]), ValueError, "up must have shape (4, 8), got (3, 8)"),
        ((G, G[:1]), ValueError, "up must have shape (4, 8), got (1, 8)"),
        ((G, G[None]), ValueError, "up must have shape (4, 8), got (1, 4, 8)"),
        ((G, torch.tensor(1.0)), ValueError, "up must have shape (4, 8), got ()"),
        ((G, G.to("meta")), ValueError, "up must be on the device of gate, cpu, got meta"),
    ],
)
def test_gate_and_up(arguments: tuple[object, ...], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        swiglu_fused(*arguments)
    with pytest.raises(error, match=re.escape(message)):
        swiglu_with_bias(*arguments, B, B)


@pytest.mark.parametrize("name", ["bias_gate", "bias_up"])
@pytest.mark.parametrize(
    ("bias", "error", "message"),
    [
        (None, TypeError, "must be a torch.Tensor, got NoneType"),
        ("b", TypeError, "must be a torch.Tensor, got str"),
        (B.double(), TypeError, f"{ONLY} float64"),
        (B[:7], ValueError, "must have shape (8,), got (7,)"),
        (B[None], ValueError, "must have shape (8,), got (1, 8)"),
        (B[0], ValueError, "must have shape (8,), got ()"),
        (B.to("meta"), ValueError, "must be on the device of gate, cpu, got meta"),
    ],
)
def test_biases(name: str, bias: object, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(f"{name} {message}")):
        swiglu_with_bias(G, G, **{"bias_gate": B, "bias_up": B, name: bias})


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (([1.0],), TypeError, "x must be a torch.Tensor, got list"),
        ((None,), TypeError, "x must be a torch.Tensor, got NoneType"),
        ((X.double(),), TypeError, f"x {ONLY} float64"),
        ((X.to_sparse(),), TypeError, "x must be a dense (strided) tensor, got layout torch.sparse_coo"),
        ((torch.tensor(1.0),), ValueError, "x must have at least one dimension, got a scalar tensor"),
        ((X[:, :7],), ValueError, "x must have an even last dimension, got shape (4, 7)"),
        ((X[:, :1],), ValueError, "x must have an even last dimension, got shape (4, 1)"),
        ((X, "b"), TypeError, "bias must be a torch.Tensor, got str"),
        ((X, XB.double()), TypeError, f"bias {ONLY} float64"),
        ((X, XB[:8]), ValueError, "bias must have shape (16,), got (8,)"),
        ((X, XB[None]), ValueError, "bias must have shape (16,), got (1, 16)"),
        ((X, XB.to("meta")), ValueError, "bias must be on the device of x, cpu, got meta"),
    ],
)
@pytest.mark.parametrize("layout", ["concat", "interleaved"])
def test_packed(arguments: tuple[object, ...], error: type[Exception], message: str, layout: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        swiglu_packed(*arguments, layout=layout)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "split"}, "layout must be one of 'concat', 'interleaved', got 'split'"),
        ({"layout": "separate"}, "layout must be one of 'concat', 'interleaved', got 'separate'"),
        ({"layout": None}, "layout must be one of 'concat', 'interleaved', got None"),
        ({"order": "gate"}, "order must be one of 'gate_first', 'up_first', got 'gate'"),
        ({"order": True}, "order must be one of 'gate_first', 'up_first', got True"),
    ],
)
def test_layout_and_order(options: dict[str, object], message: str) -> None:
    for x in (X, X.clone().requires_grad_()):
        with pytest.raises(ValueError, match=re.escape(message)):
            swiglu_packed(x, **options)


FORMS = {
    "fused": lambda **options: swiglu_fused(G, G, **options),
    "with bias": lambda **options: swiglu_with_bias(G, G, B, B, **options),
    "packed": lambda **options: swiglu_packed(X, **options),
    "with a gradient": lambda **options: swiglu_fused(G.clone().requires_grad_(), G, **options),
}


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"alpha": "1"}, TypeError, "alpha must be a number, got str"),
        ({"alpha": None}, TypeError, "alpha must be a number, got NoneType"),
        ({"alpha": torch.tensor(1.0)}, TypeError, "alpha must be a number, got Tensor"),
        ({"alpha": [1.0]}, TypeError, "alpha must be a number, got list"),
        ({"alpha": float("inf")}, ValueError, "alpha must be finite, got inf"),
        ({"alpha": float("nan")}, ValueError, "alpha must be finite, got nan"),
        ({"beta": "1"}, TypeError, "beta must be a number, got str"),
        ({"beta": None}, TypeError, "beta must be a number, got NoneType"),
        ({"beta": [0.0]}, TypeError, "beta must be a number, got list"),
        ({"beta": float("-inf")}, ValueError, "beta must be finite, got -inf"),
        ({"beta": 10**400}, ValueError, "beta must be finite, got inf"),
        # Kernels have their numbers in fp32.
        ({"alpha": 1e39}, ValueError, "alpha must be within the range of float32, got 1e+39"),
        ({"alpha": -3e38}, ValueError, "alpha must lie between -2e38 and 2e38, got -3e+38"),
        ({"beta": -1e39}, ValueError, "beta must be within the range of float32, got -1e+39"),
        ({"limit": 1e39}, ValueError, "limit must be None or a positive finite number, got 1e+39"),
        ({"limit": 0}, ValueError, "limit must be None or a positive finite number, got 0"),
        ({"limit": -7.0}, ValueError, "limit must be None or a positive finite number, got -7"),
        ({"limit": float("inf")}, ValueError, "limit must be None or a positive finite number, got inf"),
        ({"limit": float("nan")}, ValueError, "limit must be None or a positive finite number, got nan"),
        ({"limit": 10**400}, ValueError, "limit must be None or a positive finite number, got "),
    ],
)
def test_numbers(form: str, options: dict[str, object], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        FORMS[form](**options)


@pytest.mark.parametrize("form", list(FORMS))
@pytest.mark.parametrize("limit", ["7", [7.0], torch.tensor(7.0), 7j], ids=lambda limit: type(limit).__name__)
def test_a_limit_that_is_no_number(form: str, limit: object) -> None:
    with pytest.raises(TypeError, match=f"limit must be None or a .*number, got {type(limit).__name__}"):
        FORMS[form](limit=limit)


def test_a_number_that_is_a_bool_is_refused_in_a_first_call() -> None:
    # Values of their own: a bool equals the number that it stands for.
    gate = torch.ones(3, 5)
    for name in ("alpha", "beta", "limit"):
        with pytest.raises(TypeError, match=f"{name} must be .*number, got bool"):
            swiglu_fused(gate, gate, **{name: True})


@pytest.mark.parametrize(
    ("out", "error", "message"),
    [
        ([1.0], TypeError, "out must be a torch.Tensor, got list"),
        (G.half(), TypeError, "out must have dtype float32, got float16"),
        (G.double(), TypeError, "out must have dtype float32, got float64"),
        (G.to_sparse(), TypeError, "out must be a dense (strided) tensor, got layout torch.sparse_coo"),
        (G[:3].clone(), ValueError, "out must have shape (4, 8), got (3, 8)"),
        (G[None].clone(), ValueError, "out must have shape (4, 8), got (1, 4, 8)"),
        (X.clone(), ValueError, "out must have shape (4, 8), got (4, 16)"),
        (G.to("meta"), ValueError, "out must be on the device of {}, cpu, got meta"),
        (B.expand(4, 8), ValueError, "out is written in place and must not be expanded or overlap itself"),
    ],
)
def test_out(out: object, error: type[Exception], message: str) -> None:
    for owner, activation in (
        ("gate", lambda: swiglu_fused(G, G, out=out)),
        ("gate", lambda: swiglu_with_bias(G, G, B, B, out=out)),
        ("x", lambda: swiglu_packed(X, out=out)),
        ("x", lambda: swiglu_packed(X, XB, layout="interleaved", out=out)),
    ):
        with pytest.raises(error, match=re.escape(message.format(owner))):
            activation()


def test_out_has_the_dtype_of_gate_whatever_up_has() -> None:
    out = torch.empty(4, 8, dtype=torch.bfloat16)
    assert swiglu_fused(G.bfloat16(), G, out=out) is out
    with pytest.raises(TypeError, match="out must have dtype bfloat16, got float32"):
        swiglu_fused(G.bfloat16(), G, out=G.clone())


def test_an_error_leaves_out_alone() -> None:
    out = torch.full((4, 8), 3.0)
    for options in ({"alpha": "1"}, {"limit": -1.0}):
        with pytest.raises((TypeError, ValueError)):
            swiglu_fused(G, G, out=out, **options)
    with pytest.raises(ValueError, match="bias_up must have shape"):
        swiglu_with_bias(G, G, B, B[:3], out=out)
    with pytest.raises(ValueError, match="bias must have shape"):
        swiglu_packed(X, B, out=out)
    assert bool((out == 3.0).all())


def test_the_same_errors_where_a_gradient_is_wanted() -> None:
    gate, x = G.clone().requires_grad_(), X.clone().requires_grad_()
    for activation, error, message in (
        (lambda: swiglu_fused(gate, None), TypeError, "up must be a torch.Tensor, got NoneType"),
        (lambda: swiglu_fused(gate, G[:3]), ValueError, "up must have shape (4, 8), got (3, 8)"),
        (lambda: swiglu_fused(gate, G, alpha=True), TypeError, "alpha must be a number, got bool"),
        (lambda: swiglu_with_bias(gate, G, B, None), TypeError, "bias_up must be a torch.Tensor, got NoneType"),
        (lambda: swiglu_with_bias(gate, G, B[:7], B), ValueError, "bias_gate must have shape (8,), got (7,)"),
        (lambda: swiglu_packed(x[:, :7]), ValueError, "x must have an even last dimension, got shape (4, 7)"),
        (lambda: swiglu_packed(x, B), ValueError, "bias must have shape (16,), got (8,)"),
        (lambda: swiglu_packed(x, "b"), TypeError, "bias must be a torch.Tensor, got str"),
    ):
        with pytest.raises(error, match=re.escape(message)):
            activation()


def test_everything_behind_the_tensors_is_named() -> None:
    for activation in (
        lambda: swiglu_fused(G, G, 1.0),
        lambda: swiglu_with_bias(G, G, B, B, 1.0),
        lambda: swiglu_packed(X, XB, "concat"),
    ):
        with pytest.raises(TypeError, match="positional argument"):
            activation()


@pytest.mark.gpu
def test_mixed_devices_on_a_gpu() -> None:
    with pytest.raises(ValueError, match="up must be on the device of gate, cuda:0, got cpu"):
        swiglu_fused(G.cuda(), G)
    with pytest.raises(ValueError, match="bias_up must be on the device of gate, cuda:0, got cpu"):
        swiglu_with_bias(G.cuda(), G.cuda(), B.cuda(), B)
    with pytest.raises(ValueError, match="bias must be on the device of x, cuda:0, got cpu"):
        swiglu_packed(X.cuda(), XB)
    with pytest.raises(ValueError, match="out must be on the device of x, cuda:0, got cpu"):
        swiglu_packed(X.cuda(), out=torch.empty(4, 8))

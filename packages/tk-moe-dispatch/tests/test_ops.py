"""The public functions: what they refuse, and one result however they are called."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_moe_dispatch import (
    compute_permutation_indices,
    compute_permutation_indices_torch,
    expert_ffn_torch,
    expert_ffn_triton,
    fused_expert_ffn,
    fused_expert_ffn_torch,
    fused_experts,
    fused_experts_torch,
    fused_moe_forward,
    fused_moe_forward_torch,
    grouped_gemm,
    grouped_gemm_torch,
    moe_router,
    moe_router_torch,
    permute_tokens,
    permute_tokens_torch,
    route_topk,
    route_topk_torch,
    unpermute_tokens,
    unpermute_tokens_torch,
)

Tensor = torch.Tensor
Function = Callable[..., Any]

# Of no kernel: run beside what compiles, in a process that the interpreter does not slow down.
without_interpreter = pytest.mark.compiler


def operands(device: str, n_tokens: int = 2) -> dict[str, Any]:
    n = n_tokens
    generator = torch.Generator().manual_seed(0)

    def random(*shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.randn(shape, generator=generator).to(device, dtype)

    return {
        "logits": random(n, 6),
        "hidden": random(n, 16, dtype=torch.float16),
        "router_weight": random(6, 16, dtype=torch.float16),
        "router_bias": random(6),
        "correction_bias": random(6),
        "top_k": 2,
        "gating": "sigmoid",
        "renormalize": True,
        "n_groups": 3,
        "topk_groups": 2,
        "routed_scaling_factor": 1.5,
        "indices": torch.randint(0, 6, (n, 2), generator=generator).to(device),
        "num_experts": 6,
        "expert_outputs": random(2 * n, 16, dtype=torch.float16),
        "weights": random(n, 2),
        "restore_idx": torch.randperm(2 * n, generator=generator).to(device),
        "num_tokens": n,
        "tokens": random(2 * n, 16, dtype=torch.float16),
        "permuted": random(2 * n, 16, dtype=torch.float16),
        "expert_offsets": torch.tensor([0, 1, 1, 2, 3, 2 * n, 2 * n], device=device),
        "sorted_idx": torch.randperm(2 * n, generator=generator).to(device),
        "w_gate": random(6, 8, 16, dtype=torch.float16),
        "w_up": random(6, 8, 16, dtype=torch.float16),
        "w_down": random(6, 16, 8, dtype=torch.float16),
        "x": random(n, 16, dtype=torch.float16),
        "w13": random(6, 16, 16, dtype=torch.float16),
        "w2": random(6, 16, 8, dtype=torch.float16),
        "topk_weights": random(n, 2),
        "topk_ids": torch.randint(0, 4, (n, 2), generator=generator).to(device),
        "expert_map": torch.tensor([5, 2, -1, 0], device=device),
        "w13_bias": random(6, 16),
        "w2_bias": random(6, 16),
        "shared_w13": random(24, 16, dtype=torch.float16),
        "shared_w2": random(16, 12, dtype=torch.float16),
        "layout": "interleaved",
        "alpha": 1.7,
        "beta": 1.0,
        "limit": 7.0,
        "capacity_factor": 1.5,
    }


PROJECTIONS = ("w_gate", "w_up", "w_down")
FUSED = (
    *("x", "w13", "w2", "topk_weights", "topk_ids", "expert_map", "w13_bias", "w2_bias", "shared_w13", "shared_w2"),
    *("layout", "alpha", "beta", "limit", "capacity_factor"),
)
SETTINGS = ("top_k", "gating", "renormalize", "n_groups", "topk_groups", "routed_scaling_factor")
# By name: the function, its reference, and its arguments in the order of the operator.
FUNCTIONS: dict[str, tuple[Function, Function, tuple[str, ...]]] = {
    "route_topk": (route_topk, route_topk_torch, ("logits", "correction_bias", *SETTINGS)),
    "moe_router": (
        moe_router,
        moe_router_torch,
        ("hidden", "router_weight", "router_bias", "correction_bias", *SETTINGS),
    ),
    "compute_permutation_indices": (
        compute_permutation_indices,
        compute_permutation_indices_torch,
        ("indices", "num_experts"),
    ),
    "permute_tokens": (permute_tokens, permute_tokens_torch, ("hidden", "indices", "num_experts")),
    "unpermute_tokens": (
        unpermute_tokens,
        unpermute_tokens_torch,
        ("expert_outputs", "weights", "restore_idx", "num_tokens", "top_k"),
    ),
    "grouped_gemm": (grouped_gemm, grouped_gemm_torch, ("tokens", "w_gate", "expert_offsets", "num_experts")),
    "expert_ffn": (
        expert_ffn_triton,
        expert_ffn_torch,
        ("permuted", *PROJECTIONS, "expert_offsets", "num_experts"),
    ),
    "fused_expert_ffn": (
        fused_expert_ffn,
        fused_expert_ffn_torch,
        ("permuted", *PROJECTIONS, "expert_offsets", "weights", "sorted_idx", "num_experts", "num_tokens", "top_k"),
    ),
    "fused_experts": (fused_experts, fused_experts_torch, FUSED),
    "fused_moe_forward": (
        fused_moe_forward,
        fused_moe_forward_torch,
        ("hidden", "router_weight", *PROJECTIONS, "num_experts", "top_k", "gating"),
    ),
}
# Where a parameter is called otherwise than the operand here.
PARAMETERS = {"grouped_gemm": {"w_gate": "weights"}, "fused_moe_forward": {"hidden": "hidden_states"}}
each_function = pytest.mark.parametrize("name", FUNCTIONS)


def call(name: str, arguments: dict[str, Any], *, reference: bool = False) -> Any:
    function, its_reference, names = FUNCTIONS[name]
    its_names = PARAMETERS.get(name, {})
    return (its_reference if reference else function)(**{its_names.get(key, key): arguments[key] for key in names})


def parts(result: Any) -> tuple[Tensor, ...]:
    return (result,) if isinstance(result, Tensor) else tuple(result)


WRONG = [
    ("route_topk", {"logits": [1.0]}, TypeError, "logits must be a torch.Tensor, got list"),
    ("route_topk", {"logits": torch.ones(4, 6, dtype=torch.int32)}, TypeError, "logits must have dtype"),
    ("route_topk", {"logits": torch.tensor(1.0)}, ValueError, r"logits must have shape \[\.\.\., E\]"),
    ("route_topk", {"logits": torch.ones(4, 0)}, ValueError, r"logits must have shape \[\.\.\., E\] with E from 1"),
    ("route_topk", {"top_k": 0}, ValueError, "top_k must be from 1 to 6, got 0"),
    ("route_topk", {"top_k": 7}, ValueError, "top_k must be from 1 to 6, got 7"),
    ("route_topk", {"top_k": 2.0}, TypeError, "top_k must be an int, got float"),
    ("route_topk", {"gating": "relu"}, ValueError, "gating must be one of 'softmax', 'sigmoid', got 'relu'"),
    ("route_topk", {"gating": ["softmax"]}, ValueError, "gating must be one of"),
    ("route_topk", {"renormalize": 1}, TypeError, "renormalize must be a bool, got int"),
    ("route_topk", {"correction_bias": torch.ones(5)}, ValueError, r"correction_bias must have shape \(6,\)"),
    ("route_topk", {"correction_bias": torch.ones(6, device="meta")}, ValueError, "correction_bias must be on cpu"),
    ("route_topk", {"topk_groups": None}, ValueError, "n_groups and topk_groups must be given together, got 3 and"),
    ("route_topk", {"n_groups": 4}, ValueError, "n_groups must divide the number of experts, 6, got 4"),
    ("route_topk", {"topk_groups": 4}, ValueError, "topk_groups must be from 1 to 3, got 4"),
    ("route_topk", {"topk_groups": 1, "top_k": 3}, ValueError, "topk_groups must leave at least top_k = 3 experts"),
    ("route_topk", {"routed_scaling_factor": float("nan")}, ValueError, "routed_scaling_factor must be finite"),
    ("moe_router", {"hidden": torch.ones(4, 15)}, ValueError, r"hidden must have shape \[\.\.\., 16\], got \(4, 15\)"),
    ("moe_router", {"router_weight": torch.ones(6)}, ValueError, r"router_weight must have shape \[E, H\]"),
    ("moe_router", {"router_weight": torch.ones(6, 16, device="meta")}, ValueError, "router_weight must be on the dev"),
    ("moe_router", {"router_bias": torch.ones(7)}, ValueError, r"router_bias must have shape \(6,\), got \(7,\)"),
    ("permute_tokens", {"indices": torch.ones(4, 2)}, TypeError, "indices must have dtype int32, int64, got float32"),
    ("permute_tokens", {"indices": torch.tensor(1)}, ValueError, r"indices must have shape \[\.\.\., top_k\]"),
    ("permute_tokens", {"num_experts": 0}, ValueError, "num_experts must be at least 1, got 0"),
    ("permute_tokens", {"hidden": torch.ones(3, 16)}, ValueError, r"hidden must have shape \(4, 'H'\) beside indices"),
    ("compute_permutation_indices", {"num_experts": "6"}, TypeError, "num_experts must be an int, got str"),
    ("unpermute_tokens", {"num_tokens": 3}, ValueError, r"expert_outputs must have shape \(6, H\), got \(8, 16\)"),
    ("unpermute_tokens", {"top_k": 0}, ValueError, "top_k must be at least 1, got 0"),
    ("unpermute_tokens", {"weights": torch.ones(8)}, ValueError, r"weights must have shape \(4, 2\), got \(8,\)"),
    ("unpermute_tokens", {"restore_idx": torch.ones(4, 2).int()}, ValueError, r"restore_idx must have shape \(8,\)"),
    ("grouped_gemm", {"tokens": torch.ones(8, 15).half()}, ValueError, r"weights must have shape \(6, 'any', 15\)"),
    (
        "grouped_gemm",
        {"w_gate": torch.ones(6, 8, 16)},
        TypeError,
        "weights must have the dtype of tokens, torch.float16",
    ),
    (
        "grouped_gemm",
        {"expert_offsets": torch.arange(6)},
        ValueError,
        r"expert_offsets must have shape \(7,\), got \(6",
    ),
    ("expert_ffn", {"w_up": torch.ones(6, 7, 16).half()}, ValueError, r"w_up must have shape \(6, 8, 16\), got \(6, 7"),
    ("expert_ffn", {"w_down": torch.ones(6, 8, 16).half()}, ValueError, r"w_down must have shape \(6, 16, 8\)"),
    ("fused_expert_ffn", {"sorted_idx": torch.arange(7)}, ValueError, r"sorted_idx must have shape \(8,\), got \(7,\)"),
    ("fused_experts", {"w13": torch.ones(6, 15, 16).half()}, ValueError, r"w13 must have shape \[E, 2 \* F, H\]"),
    ("fused_experts", {"w2": torch.ones(5, 16, 8).half()}, ValueError, r"w2 must have shape \(6, 16, 8\), got \(5"),
    ("fused_experts", {"topk_ids": torch.ones(3, 2).int()}, ValueError, r"topk_ids must have shape \(4, 'top_k'\)"),
    ("fused_experts", {"topk_weights": torch.ones(4, 3)}, ValueError, r"topk_weights must have shape \(4, 'top_k'\)"),
    ("fused_experts", {"expert_map": torch.ones(4)}, TypeError, "expert_map must have dtype int32, int64, got float32"),
    ("fused_experts", {"w13_bias": torch.ones(16)}, ValueError, r"w13_bias must have shape \(6, 16\), got \(16,\)"),
    ("fused_experts", {"shared_w2": None}, ValueError, "shared_w13 and shared_w2 must be given together"),
    ("fused_experts", {"shared_w2": torch.ones(12, 16).half()}, ValueError, r"shared_w2 must have shape \(16, 12\)"),
    ("fused_experts", {"layout": "packed"}, ValueError, "layout must be one of 'concat', 'interleaved', got 'packed'"),
    ("fused_experts", {"limit": -1.0}, ValueError, "limit must be finite and at least 0, got -1"),
    ("fused_experts", {"capacity_factor": "2"}, TypeError, "capacity_factor must be a number, got str"),
    ("fused_moe_forward", {"num_experts": 5}, ValueError, "num_experts must be from 6 to 6, got 5"),
    ("fused_moe_forward", {"hidden": torch.ones(4, 15)}, ValueError, r"hidden_states must have shape \[\.\.\., 16\]"),
    ("unpermute_tokens", {"num_tokens": 2**31}, ValueError, r"num_tokens \* top_k must be from 0 to 1073741824"),
]


@without_interpreter
@pytest.mark.parametrize(("name", "change", "error", "message"), WRONG)
def test_bad_arguments_are_named(name: str, change: dict[str, Any], error: type[Exception], message: str) -> None:
    for reference in (False, True):
        with pytest.raises(error, match=message):
            call(name, {**operands("cpu", 4), **change}, reference=reference)


@without_interpreter
@each_function
def test_a_gradient_is_refused(name: str, device: str) -> None:
    arguments = operands(device)
    argument = FUNCTIONS[name][2][0]
    if not arguments[argument].is_floating_point():
        return
    arguments[argument].requires_grad_()
    with pytest.raises(NotImplementedError, match=f"tk_moe_dispatch::{name} has no derivative"):
        call(name, arguments)
    with torch.no_grad():
        assert not any(part.requires_grad for part in parts(call(name, arguments)))


@each_function
def test_a_call_is_like_the_one_before_and_like_its_fake(name: str, device: str) -> None:
    arguments = operands(device)
    first = parts(call(name, arguments))
    assert all(map(torch.equal, parts(call(name, arguments)), first))
    with FakeTensorMode() as mode:
        fake_arguments = {
            key: mode.from_tensor(value) if isinstance(value, Tensor) else value for key, value in arguments.items()
        }
        operator = getattr(torch.ops.tk_moe_dispatch, name).default
        fakes = parts(operator(*(fake_arguments[key] for key in FUNCTIONS[name][2])))
    for fake, part in zip(fakes, first, strict=True):
        assert (fake.shape, fake.stride(), fake.dtype) == (part.shape, part.stride(), part.dtype)
        assert fake.device == part.device
        assert part.is_contiguous()
    # On the meta device there are only shapes.
    bare = {key: value.to("meta") if isinstance(value, Tensor) else value for key, value in arguments.items()}
    for shape, part in zip(parts(call(name, bare)), first, strict=True):
        assert shape.is_meta
        assert (shape.shape, shape.stride(), shape.dtype) == (part.shape, part.stride(), part.dtype)


@without_interpreter
def test_all_functions_compile_for_any_number_of_tokens(device: str) -> None:
    torch._dynamo.reset()
    settings = {key: value for key, value in operands(device).items() if not isinstance(value, Tensor)}

    def all_of_them(tensors: dict[str, Tensor]) -> list[Tensor]:
        arguments = {**settings, **tensors, "num_tokens": tensors["hidden"].shape[0]}
        return [part for name in FUNCTIONS for part in parts(call(name, arguments))]

    compiled = torch.compile(all_of_them, fullgraph=True, dynamic=True, backend="aot_eager")
    with torch._dynamo.config.patch(error_on_recompile=True):
        # Sizes that no other dimension has: those that are equal at first PyTorch takes for the same.
        for n_tokens in (5, 7):
            tensors = {key: value for key, value in operands(device, n_tokens).items() if isinstance(value, Tensor)}
            assert all(map(torch.equal, compiled(tensors), all_of_them(tensors)))


@without_interpreter
@each_function
def test_opcheck(name: str, device: str) -> None:
    operator, arguments = getattr(torch.ops.tk_moe_dispatch, name).default, operands(device)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(operator, tuple(arguments[key] for key in FUNCTIONS[name][2]), test_utils=tests)

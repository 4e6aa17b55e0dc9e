"""Which experts are chosen, and with which weights: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.numerics import rounding_tolerance
from tk_moe_dispatch import _routing_plans, moe_router, moe_router_torch, route_topk, route_topk_torch
from tk_moe_dispatch._routing_plans import _scoring
from tk_testkit import assert_close, guarded_view

Tensor = torch.Tensor
FP32 = rounding_tolerance(torch.float32, 64, magnitude=1.0)
runs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or interpreting()), reason="kernels run on a GPU, or with TRITON_INTERPRET=1"
)
each_gating = pytest.mark.parametrize("gating", ["softmax", "sigmoid"])


def spread(n_tokens: int, n_experts: int, device: str, seed: int = 0) -> Tensor:
    """Logits from -4 to 4 that lie apart by more than scores are rounded by."""
    generator = torch.Generator().manual_seed(seed)
    rows = [torch.randperm(n_experts, generator=generator) for _ in range(n_tokens)]
    return (torch.stack(rows) * (8.0 / n_experts) - 4.0).to(device)


def spelled_out(
    row: list[float],
    top_k: int,
    gating: str,
    renormalize: bool,
    bias: list[float] | None,
    groups: tuple[int, int] | None,
    scale: float,
) -> tuple[list[int], list[float]]:
    """One token's experts and weights, step by step, in Python's numbers."""
    n = len(row)
    total = sum(map(math.exp, row))
    scores = [math.exp(z) / total if gating == "softmax" else 1 / (1 + math.exp(-z)) for z in row]
    biased = [score + (bias[e] if bias else 0.0) for e, score in enumerate(scores)]
    allowed = set(range(n))
    if groups:
        size = n // groups[0]
        members = [range(g * size, (g + 1) * size) for g in range(groups[0])]
        best = sorted(members, key=lambda its: -sum(sorted((biased[e] for e in its), reverse=True)[:2]))
        allowed = {e for its in best[: groups[1]] for e in its}
    ids = sorted(allowed, key=lambda e: (-biased[e], e))[:top_k]
    divisor = sum(scores[e] for e in ids) if renormalize else 1.0
    return ids, [scores[e] / divisor * scale for e in ids]


@each_gating
@pytest.mark.parametrize(
    ("n_experts", "top_k", "groups", "has_bias", "renormalize"),
    [
        (8, 2, None, False, False),
        (60, 4, None, True, True),
        (1, 1, None, False, True),
        (7, 7, None, True, False),
        (60, 6, (6, 2), True, True),
        (8, 3, (8, 3), False, False),
        (12, 4, (1, 1), False, True),
    ],
)
def test_the_best_experts_come_first_with_the_weights_of_the_formula(
    gating: str, n_experts: int, top_k: int, groups: Any, has_bias: bool, renormalize: bool, device: str
) -> None:
    logits = spread(1 if has_bias else 2, n_experts, device)
    bias = spread(1, n_experts, device, seed=1)[0] / 10 if has_bias else None
    n_groups, topk_groups = groups or (None, None)
    settings = {"renormalize": renormalize, "n_groups": n_groups, "topk_groups": topk_groups}
    ids, weights = route_topk(logits, top_k, gating, correction_bias=bias, routed_scaling_factor=2.5, **settings)
    assert (ids.dtype, weights.dtype, ids.shape, weights.shape) == (
        torch.int64,
        torch.float32,
        *2 * [(len(logits), top_k)],
    )
    for row, its_ids, its_weights in zip(logits.tolist(), ids, weights, strict=True):
        biases = None if bias is None else bias.tolist()
        want_ids, want_weights = spelled_out(row, top_k, gating, renormalize, biases, groups, 2.5)
        assert its_ids.tolist() == want_ids
        want = torch.tensor(want_weights, dtype=torch.float64, device=device)
        assert_close(its_weights, want, rounding_tolerance(torch.float32, 64, magnitude=2.5))


def test_conventions_of_models(device: str) -> None:
    logits = spread(2, 16, device)
    best = logits.sort(-1, descending=True)
    # Mixtral takes softmax of the chosen logits, Qwen3-MoE softmax of all, divided by the sum over those chosen.
    ids, weights = route_topk(logits, 4, renormalize=True)
    assert torch.equal(ids, best.indices[:, :4])
    assert_close(weights, best.values[:, :4].softmax(-1), FP32)
    qwen3 = logits.softmax(-1).gather(-1, ids)
    assert_close(weights, qwen3 / qwen3.sum(-1, keepdim=True), FP32)
    # Llama-4 takes sigmoid of the best logit.
    ids, weights = route_topk(logits, 1, "sigmoid")
    assert torch.equal(ids, best.indices[:, :1])
    assert_close(weights, best.values[:, :1].sigmoid(), FP32)


def test_the_correction_bias_chooses_and_does_not_weigh(device: str) -> None:
    logits = torch.tensor([[3.0, 2.0, 1.0, 0.0]], device=device)
    bias = torch.tensor([-9.0, 0.0, 0.0, 9.0], dtype=torch.float64, device=device)
    ids, weights = route_topk(logits, 2, "sigmoid", correction_bias=bias)
    assert ids.tolist() == [[3, 1]]
    assert_close(weights, logits[:, [3, 1]].sigmoid(), FP32)
    # A score is not what is left of score + bias after the bias is taken away: that would be 0 here.
    ids, weights = route_topk(torch.full((1, 4), -40.0, device=device), 1, "sigmoid", correction_bias=bias)
    assert ids.tolist() == [[3]]
    assert_close(weights, torch.full((1, 1), math.exp(-40.0), dtype=torch.float64, device=device), FP32)
    assert float(weights) > 0.0


@each_gating
def test_logits_that_are_not_finite_stay_with_their_token(gating: str, device: str) -> None:
    n_experts = 6
    logits, inf, nan = spread(5, n_experts, device), float("inf"), float("nan")
    clean = logits[2:3].clone()
    logits[0], logits[1, 2], logits[4] = nan, nan, -inf
    logits[3, 1] = logits[3, 4] = inf
    for settings in ({"renormalize": True}, {"correction_bias": torch.zeros(n_experts, device=device)}):
        ids, weights = route_topk(logits, 3, gating, **settings)
        want_ids, want_weights = route_topk(clean, 3, gating, **settings)
        assert torch.equal(ids[2:3], want_ids)
        assert torch.equal(weights[2:3], want_weights)
        assert weights.isfinite().all()
        assert ids[[0, 4]].tolist() == 2 * [[0, 1, 2]]
        assert 2 not in ids[1]
        assert ids[3, :2].tolist() == [1, 4]
    ids, _ = route_topk(logits[[0, 1, 3]], n_experts, gating)
    assert ids.sort(-1).values.tolist() == 3 * [list(range(n_experts))]
    bad_bias = torch.full((n_experts,), nan, device=device)
    ids, weights = route_topk(clean, 2, gating, correction_bias=bad_bias)
    assert ids.tolist() == [[0, 1]]
    assert weights.isfinite().all()


def test_scores_that_vanish_are_not_divided_by_zero(device: str) -> None:
    for dtype, logit in ((torch.float32, -100.0), (torch.bfloat16, -100.0), (torch.float16, -20.0)):
        logits = torch.full((2, 8), logit, dtype=dtype, device=device)
        logits[1, 5] += 1.0
        bias = torch.tensor([0, 0, 0, 2, 0, 1, 0, 0], dtype=torch.float32, device=device)
        ids, weights = route_topk(logits, 2, "sigmoid", renormalize=True, correction_bias=bias)
        assert ids.tolist() == [[3, 5], [3, 5]]
        # As the scores weigh in relation to one another, whatever fp32 makes of them.
        shares = logits[:, [3, 5]].double().sigmoid()
        assert_close(weights, shares / shares.sum(-1, keepdim=True), FP32)
        for gating in ("softmax", "sigmoid"):
            _, weights = route_topk(logits, 1, gating, renormalize=True)
            assert weights.tolist() == [[1.0], [1.0]]
    # Chosen from a group whose softmax scores are all 0.
    far = torch.tensor([[200.0, -200.0, 0.0, 0.0]], device=device)
    bias = torch.tensor([-9.0, -9.0, 0.0, 0.0], device=device)
    groups = {"n_groups": 2, "topk_groups": 1}
    ids, weights = route_topk(far, 2, renormalize=True, correction_bias=bias, **groups)
    assert (ids.tolist(), weights.tolist()) == ([[2, 3]], [[0.5, 0.5]])


def test_what_bfloat16_cannot_tell_apart_is_told_apart(device: str) -> None:
    ids, _ = route_topk(torch.tensor([[1.0, 1 + 1 / 512, 0.0, 0.0]], device=device), 1)
    assert ids.tolist() == [[1]]
    bias = torch.tensor([0.0, 0.0, 1 / 8192, 0.0], device=device)
    ids, _ = route_topk(torch.ones(1, 4, dtype=torch.bfloat16, device=device), 1, "sigmoid", correction_bias=bias)
    assert ids.tolist() == [[2]]
    # Neither does rounding of the hidden state's scores choose.
    hidden = torch.tensor([[1.0, 1 / 512]], dtype=torch.bfloat16, device=device)
    weight = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.bfloat16, device=device)
    ids, _, logits = moe_router(hidden, weight, 1)
    assert ids.tolist() == [[1]]
    assert logits.tolist() == [[1.0, 1 + 1 / 512]]


@each_gating
def test_of_equal_scores_the_lowest_index_comes_first(gating: str, device: str) -> None:
    for n_experts in (6, 60):
        zeros = torch.zeros(2, n_experts, device=device)
        zeros[1, ::2] = -0.0
        for _ in range(50 if device == "cuda" else 1):
            assert route_topk(zeros, 2, gating)[0].tolist() == [[0, 1], [0, 1]]
        zeros[:, 3] = 1.0
        assert route_topk(zeros, 3, gating, correction_bias=zeros[0] * 0)[0].tolist() == 2 * [[3, 0, 1]]
    groups = {"n_groups": 4, "topk_groups": 2}
    assert route_topk(torch.zeros(1, 8, device=device), 3, gating, **groups)[0].tolist() == [[0, 1, 2]]


@pytest.mark.usefixtures("poisoned_memory")
def test_more_than_a_thousand_experts(device: str) -> None:
    logits = spread(2, 1100, device)
    ids, weights = route_topk(logits, 9)
    want = logits.sort(-1, descending=True)
    assert torch.equal(ids, want.indices[:, :9])
    assert_close(weights, logits.double().softmax(-1).gather(-1, ids), FP32)


def test_logits_of_any_rank_and_strides(device: str) -> None:
    logits = spread(4, 8, device)
    want = route_topk(logits, 2)
    for view in (
        logits.view(2, 2, 8),
        logits.t().contiguous().t(),
        guarded_view((4, 8), (11, 1), device=device).copy_(logits),
    ):
        ids, weights = route_topk(view, 2)
        assert ids.shape == weights.shape == (*view.shape[:-1], 2)
        assert torch.equal(ids.view(4, 2), want[0])
        assert torch.equal(weights.view(4, 2), want[1])
    ids, weights = route_topk(logits[:0], 2)
    assert (ids.shape, ids.dtype, weights.shape, weights.dtype) == ((0, 2), torch.int64, (0, 2), torch.float32)


def operands(
    n_tokens: int, n_experts: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str
) -> Any:
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(n_tokens, width + 8, generator=generator).to(device, dtype)
    weight = torch.randn(n_experts, width, generator=generator).to(device, weight_dtype)
    return rows[:, :width], weight


def check_logits(logits: Tensor, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> None:
    want = hidden.double() @ weight.double().T + (0 if bias is None else bias.double())
    terms = float((hidden.double().abs() @ weight.double().abs().T).max())
    assert logits.dtype == torch.float32
    assert_close(logits, want, rounding_tolerance(torch.float32, hidden.shape[1], magnitude=terms))


# One block of columns and experts, and more, the last not full; few tokens, and many, which PyTorch scores in fp32.
SCORED = [
    (1, 8, 512, torch.bfloat16, torch.bfloat16),
    (17, 20, 270, torch.float16, torch.float16),
    (17, 20, 70, torch.bfloat16, torch.float32),
    (1, 8, 64, torch.float32, torch.float32),
    (70, 33, 64, torch.bfloat16, torch.bfloat16),
    (70, 33, 64, torch.float32, torch.float32),
]


@runs_kernels
@pytest.mark.parametrize(("n_tokens", "n_experts", "width", "dtype", "weight_dtype"), SCORED)
@pytest.mark.usefixtures("poisoned_memory")
def test_parts_of_logits_add_up_to_them(
    n_tokens: int, n_experts: int, width: int, dtype: torch.dtype, weight_dtype: torch.dtype, device: str
) -> None:
    hidden, weight = operands(n_tokens, n_experts, width, dtype, weight_dtype, device)
    n_parts, score = _scoring(hidden, weight)
    check_logits(score(hidden, weight).view(n_parts, n_tokens, n_experts).sum(0), hidden, weight)


@pytest.mark.parametrize(
    ("n_experts", "width", "n_parts", "has_bias"), [(9, 48, 1, False), (9, 600, 4, True), (9, 1100, 16, False)]
)
def test_the_router_chooses_by_the_logits_it_returns(
    n_experts: int, width: int, n_parts: int, has_bias: bool, device: str
) -> None:
    hidden, weight = operands(2, n_experts, width, torch.bfloat16, torch.bfloat16, device)
    if interpreting():
        assert _scoring(hidden, weight)[0] == n_parts
    bias = torch.arange(n_experts, device=device).to(torch.bfloat16) if has_bias else None
    ids, weights, logits = moe_router(hidden, weight, 3, "sigmoid", bias, renormalize=True)
    check_logits(logits, hidden, weight, bias)
    want_ids, want_weights = route_topk_torch(logits, 3, "sigmoid", renormalize=True)
    assert torch.equal(ids, want_ids)
    assert_close(weights, want_weights, FP32)


def test_router_of_any_rank_and_of_nothing(device: str) -> None:
    hidden, weight = operands(4, 5, 32, torch.float16, torch.float16, device)
    want = moe_router(hidden, weight, 2)
    got = moe_router(hidden.unflatten(0, (2, 2)), weight, 2)
    for part, its_want in zip(got, want, strict=True):
        assert part.shape == (2, 2, its_want.shape[-1])
        assert torch.equal(part.view(its_want.shape), its_want)
    check_logits(moe_router(hidden, weight.t().contiguous().t(), 2).router_logits, hidden, weight)
    nothing = moe_router(hidden[:0], weight, 2)
    assert [part.shape for part in nothing] == [(0, 2), (0, 2), (0, 5)]
    empty = moe_router(hidden[:, :0], weight[:, :0], 2)
    assert empty.top_k_indices.tolist() == 4 * [[0, 1]]
    assert empty.router_logits.tolist() == 4 * [[0.0] * 5]


@pytest.mark.parametrize("most_tokens", [0, 64])
def test_autocast_changes_nothing(most_tokens: int, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # By PyTorch, as many tokens are scored, and by the kernel.
    monkeypatch.setattr(_routing_plans, "_MOST_TOKENS_IN_FP32", most_tokens)
    hidden, weight = operands(2, 8, 48 + most_tokens, torch.float32, torch.float32, device)
    want, want_torch = moe_router(hidden, weight, 2), moe_router_torch(hidden, weight, 2)
    with torch.autocast(device, torch.bfloat16):
        got, got_torch = moe_router(hidden, weight, 2), moe_router_torch(hidden, weight, 2)
    for part, its_want in zip((*got, *got_torch), (*want, *want_torch), strict=True):
        assert torch.equal(part, its_want)

"""Tokens on their way to the experts and back: in the interpreter on a CPU, compiled on a GPU."""

from __future__ import annotations

import pytest
import torch

from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.numerics import rounding_tolerance
from tk_moe_dispatch import _plans, permute_tokens, permute_tokens_torch, unpermute_tokens
from tk_testkit import assert_close, assert_guards_intact, guarded_view

Tensor = torch.Tensor
runs_kernels = pytest.mark.skipif(
    not (torch.cuda.is_available() or interpreting()), reason="kernels run on a GPU, or with TRITON_INTERPRET=1"
)
DTYPES = [torch.float16, torch.bfloat16, torch.float32]


def routed(n_tokens: int, top_k: int, n_experts: int, device: str, lowest: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(n_tokens + top_k)
    return torch.randint(lowest, n_experts, (n_tokens, top_k), generator=generator).to(device)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("width", "stride", "dtype"),
    [
        (1, 1, torch.bfloat16),
        (130, 143, torch.float16),
        (1030, 1032, torch.float32),
    ],
)
def test_rows_are_the_tokens_of_their_slots(width: int, stride: int, dtype: torch.dtype, device: str) -> None:
    hidden = guarded_view((5, width), (stride, 1), dtype, device=device)
    indices = routed(5, 3, 4, device)
    permuted, offsets, sorted_idx, restore_idx = permute_tokens(hidden, indices, 4)
    assert permuted.dtype == dtype
    assert torch.equal(permuted, hidden[indices.flatten().argsort(stable=True) // 3])
    assert torch.equal(permuted[restore_idx], hidden.repeat_interleave(3, 0))
    assert torch.equal(sorted_idx, indices.flatten().argsort(stable=True))
    assert offsets.tolist() == [int((indices < expert).sum()) for expert in range(5)]
    assert_guards_intact(hidden)


def test_tokens_of_any_rank_and_none(device: str) -> None:
    hidden = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(0)).to(device)
    indices = routed(6, 2, 4, device)
    want = permute_tokens(hidden.view(6, 16), indices, 4)
    strided = hidden.transpose(0, 1).contiguous().transpose(0, 1)
    assert all(map(torch.equal, permute_tokens(strided, indices.view(2, 3, 2), 4), want))
    permuted, offsets, sorted_idx, restore_idx = permute_tokens(hidden.view(6, 16)[:0], indices[:0], 4)
    assert (permuted.shape, offsets.tolist()) == ((0, 16), [0] * 5)
    assert sorted_idx.numel() == restore_idx.numel() == 0
    assert unpermute_tokens(permuted, torch.ones(0, 2, device=device), restore_idx, 0, 2).shape == (0, 16)
    assert permute_tokens(hidden[..., :0], indices.view(2, 3, 2), 4)[0].shape == (12, 0)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize(
    ("top_k", "width", "dtype"),
    [(1, 1100, torch.float32), (3, 130, torch.bfloat16), (11, 8, torch.float16)],
)
def test_outputs_are_combined_with_their_weights(top_k: int, width: int, dtype: torch.dtype, device: str) -> None:
    indices = routed(4, top_k, 5, device, lowest=-1)
    generator = torch.Generator().manual_seed(1)
    outputs = torch.randn(4 * top_k, width, generator=generator).to(device, dtype)
    weights = torch.rand(4, top_k, generator=generator).to(device)
    restore_idx = permute_tokens_torch(outputs[:4], indices, 5)[3]
    # Rows and weights that belong to nobody are not looked at.
    outputs[int((indices >= 0).sum()) :] = float("nan")
    poisoned = weights.masked_fill(indices < 0, float("nan"))
    rows = torch.where((restore_idx < 0)[:, None], 0.0, outputs.double()[restore_idx]).view(4, top_k, width)
    want = (rows * weights.double()[..., None]).sum(1)
    tolerance = rounding_tolerance(dtype, top_k, magnitude=float(rows.abs().max()))
    for its_weights, index in ((poisoned, restore_idx), (poisoned.double(), restore_idx.to(torch.int32))):
        got = unpermute_tokens(outputs, its_weights, index, 4, top_k)
        assert got.dtype == dtype
        assert_close(got, want.to(dtype), tolerance)


def test_experts_elsewhere_contribute_nothing(device: str) -> None:
    hidden = torch.randn(6, 32, generator=torch.Generator().manual_seed(0)).to(device)
    indices, weights = routed(6, 2, 8, device), torch.ones(6, 2, device=device)

    def through(here: Tensor) -> Tensor:
        permuted, _, _, restore_idx = permute_tokens(hidden, here, 8)
        return unpermute_tokens(permuted, weights, restore_idx, 6, 2)

    halves = [through(torch.where(is_here, indices, -1)) for is_here in (indices < 4, indices >= 4)]
    assert torch.equal(halves[0] + halves[1], through(indices))
    absent = through(torch.full_like(indices, -1))
    assert torch.equal(absent, torch.zeros_like(hidden))
    # Rows that no slot fills are zeros.
    assert torch.equal(permute_tokens(hidden, torch.full_like(indices, -1), 8)[0], hidden.new_zeros(12, 32))


def test_sums_are_formed_in_fp32_and_rounded_once(device: str) -> None:
    # In bfloat16 each 1 is lost beside 256.
    outputs = torch.ones(16, 8, dtype=torch.bfloat16, device=device)
    outputs[[0, 8]] = 256.0
    index = torch.arange(16, device=device)
    got = unpermute_tokens(outputs, torch.ones(2, 8, device=device), index, 2, 8)
    assert got.tolist() == torch.full((2, 8), 263.0).bfloat16().tolist() == 2 * [[264.0] * 8]
    # The weights stay in fp32: in bfloat16 this one would be 1.
    weights = torch.full((16, 1), 1 + 1 / 1024, device=device)
    assert unpermute_tokens(outputs.float(), weights, index, 16, 1).unique().tolist() == [1 + 1 / 1024, 256.25]


@runs_kernels
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_rows_in_the_order_of_slots_and_what_all_experts_share(dtype: torch.dtype, device: str) -> None:
    outputs = torch.randn(6, 40, generator=torch.Generator().manual_seed(0)).to(device, dtype)
    shared = torch.randn(2, 40, generator=torch.Generator().manual_seed(1)).to(device, dtype)
    positions = torch.tensor([4, -1, 0, 1, 2, -1], dtype=torch.int32, device=device)
    outputs[positions < 0] = float("nan")
    for added in (None, shared):
        combine = _plans.combination(2, 3, 40, dtype, outputs.device, is_sorted=False)
        want = torch.where((positions < 0)[:, None], 0.0, outputs.double()).view(2, 3, 40).sum(1)
        want = want if added is None else want + added.double()
        assert_close(
            combine(outputs, positions, None, added), want.to(dtype), rounding_tolerance(dtype, 4, magnitude=4)
        )


@pytest.mark.gpu
def test_the_same_bits_in_every_run(device: str) -> None:
    n_tokens, width = 512, 2048
    outputs = torch.randn(n_tokens * 8, width, generator=torch.Generator().manual_seed(0)).to(device, torch.bfloat16)
    index, weights = torch.randperm(n_tokens * 8).to(device), torch.rand(n_tokens, 8, device=device)
    first = unpermute_tokens(outputs, weights, index, n_tokens, 8)
    for _ in range(100):
        assert torch.equal(unpermute_tokens(outputs, weights, index, n_tokens, 8), first)


@runs_kernels
def test_an_index_beyond_the_rows_reads_nothing(device: str) -> None:
    outputs = torch.ones(4, 8, device=device)
    index = torch.tensor([0, 4, 2**31 - 1, 3], device=device)
    got = unpermute_tokens(outputs, torch.ones(2, 2, device=device), index, 2, 2)
    assert torch.equal(got, torch.ones(2, 8, device=device))

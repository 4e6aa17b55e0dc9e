"""What the kernels are compiled to. No GPU is involved."""

from __future__ import annotations

import pytest
import torch

from tk_kernel_core.aot import compile_launch
from tk_kernel_core.launch import KernelLaunch, planning
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS, Target
from tk_moe_dispatch import fused_experts, moe_router, permute_tokens, unpermute_tokens

pytestmark = pytest.mark.compiler

H200 = COMPILE_TARGETS["sm_90"]
# Experts, top-k, hidden size and size inside an expert.
MODELS = {"mixtral": (8, 2, 4096, 14_336), "qwen2-57b": (64, 8, 3584, 2560), "deepseek-v3": (256, 8, 7168, 2048)}


def meta(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def launches(n_tokens: int, n_experts: int, top_k: int, width: int, target: Target) -> dict[str, KernelLaunch]:
    """All kernels of routing as in DeepSeek-V3, of permutation and of combination, by name."""
    groups = {"n_groups": 8, "topk_groups": 4} if n_experts == 256 else {}
    bias = meta(n_experts, dtype=torch.float32)
    with planning(target) as made:
        indices, weights, _ = moe_router(
            *(meta(n_tokens, width), meta(n_experts, width), top_k, "sigmoid"),
            renormalize=True,
            correction_bias=bias,
            **groups,
        )
        permuted, _, _, restore_idx = permute_tokens(meta(n_tokens, width), indices, n_experts)
        unpermute_tokens(permuted, weights, restore_idx, n_tokens, top_k)
    return {launch.kernel: launch for launch in made}


@pytest.mark.parametrize(("n_tokens", "n_experts", "top_k", "width"), [(4096, 256, 8, 7168)])
@pytest.mark.parametrize(
    "target", [COMPILE_TARGETS[name] for name in ("sm_90", "gfx942")], ids=lambda target: target.name
)
def test_nothing_spills_and_rows_move_16_bytes_at_a_time(
    n_tokens: int, n_experts: int, top_k: int, width: int, target: Target
) -> None:
    kernels = {"router_logits_kernel", "route_kernel", "schedule_kernel", "permute_kernel", "combine_kernel"}
    if n_tokens > 1:
        kernels.add("count_kernel")
    made = launches(n_tokens, n_experts, top_k, width, target)
    assert set(made) == kernels
    found = {name: inspect(compile_launch(launch, target)) for name, launch in made.items()}
    assert {name: its.spill_bytes for name, its in found.items()} == dict.fromkeys(kernels, 0)
    assert not [name for name, its in found.items() if "ld.local" in its.instructions or its.overwritten_operands]
    for name in ("permute_kernel", "combine_kernel"):
        assert found[name].instructions["ld.global.v4"] > 0
        assert found[name].instructions["st.global.v4"] > 0
    # No atomics on device memory: the order of slots and sums is the same in every run.
    assert not [name for name, its in found.items() if its.instructions.get("atom")]
    units = {"mma.sync", "wgmma", "tcgen05", "v_mfma"}
    assert units & set(found["router_logits_kernel"].instructions)


@pytest.mark.parametrize(("n_tokens", "n_experts", "width"), [(8, 130, 101), (5000, 130, 101), (5000, 600, 136)])
def test_scoring_by_odd_sizes_leaves_enough_registers(n_tokens: int, n_experts: int, width: int) -> None:
    target = COMPILE_TARGETS["sm_90"]
    with planning(target) as made:
        moe_router(meta(n_tokens, width), meta(n_experts, width), 3)
    found = [inspect(compile_launch(launch, target)) for launch in made]
    assert [its.spill_bytes for its in found] == [0, 0]


@pytest.mark.parametrize(
    ("layout", "row_stride", "ffn", "turn"),
    [
        ("concat", 128, 128, 64),
        ("interleaved", 128, 128, 64),
        ("concat", 136, 192, 64),
        # 132 elements from gate to up are no multiple of 16 bytes; twice as many, from row to row of each, are.
        ("interleaved", 132, 128, 0),
        ("concat", 128, 96, 0),
    ],
)
def test_gate_and_up_are_one_product_where_a_descriptor_reaches_both(
    layout: str, row_stride: int, ffn: int, turn: int
) -> None:
    n_tokens, width = 512, 128
    w13 = meta(8, 2 * ffn, row_stride)[..., :width]
    ids = meta(n_tokens, 2, dtype=torch.int64)
    with planning(COMPILE_TARGETS["sm_90"]) as made:
        fused_experts(meta(n_tokens, width), w13, meta(8, width, ffn), meta(n_tokens, 2), ids, layout=layout)
    products = [dict(launch.arguments) for launch in made if launch.kernel == "expert_gemm_kernel"]
    assert [(one["GATED"], one["DESCRIPTORS"], one["TURN"]) for one in products] == [
        (True, True, turn),
        (False, True, 0),
    ]


def products_of(
    model: tuple[int, int, int, int], n_tokens: int, dtype: torch.dtype, has_bias: bool
) -> list[KernelLaunch]:
    """The products that tokens go through in the experts of a model on an H200."""
    n_experts, top_k, hidden, ffn = model
    x, w13, w2 = (
        meta(*shape, dtype=dtype)
        for shape in ((n_tokens, hidden), (n_experts, 2 * ffn, hidden), (n_experts, hidden, ffn))
    )
    weights, ids = (meta(n_tokens, top_k, dtype=kind) for kind in (torch.float32, torch.int32))
    biases = {"w13_bias": meta(n_experts, 2 * ffn, dtype=dtype), "w2_bias": meta(n_experts, hidden, dtype=dtype)}
    with planning(H200) as made:
        fused_experts(x, w13, w2, weights, ids, **(biases if has_bias else {}))
    return [launch for launch in made if launch.kernel.startswith(("expert_gemm", "stream_"))]


@pytest.mark.tested_triton
@pytest.mark.parametrize(
    ("hidden", "ffn", "n_tokens"),
    [(4096, 14_336, 64), (4096, 14_336, 128), (4096, 14_336, 2048), (136, 72, 512), (1001, 513, 512)],
)
def test_biases_and_odd_sizes_leave_enough_registers(hidden: int, ffn: int, n_tokens: int) -> None:
    # The cases of the spec have neither.
    for launch in products_of((8, 2, hidden, ffn), n_tokens, torch.bfloat16, True):
        made = inspect(compile_launch(launch, H200))
        assert made.spill_bytes == 0
        assert made.overwritten_operands == 0


@pytest.mark.parametrize(
    ("n_tokens", "rows", "dtype"), [(32, 16, torch.float16), (128, 64, torch.float16), (1024, 128, torch.bfloat16)]
)
def test_swiglu_needs_no_shared_memory_but_for_the_store(n_tokens: int, rows: int, dtype: torch.dtype) -> None:
    for launch in products_of(MODELS["mixtral"], n_tokens, dtype, False):
        made = inspect(compile_launch(launch, H200))
        tile = dict(launch.arguments)
        assert tile["BLOCK_M"] == rows
        n_stores = rows * tile["BLOCK_N"] // (8 * 32 * made.num_warps)
        assert made.instructions["st.shared"] == made.instructions["st.global.v4"] == n_stores
        assert {name for name in made.instructions if name.startswith("cp.async")} <= {"cp.async.v4"}
        assert made.instructions["tma"] > 0
        assert made.instructions["wgmma"] > 0


@pytest.mark.tested_triton
@pytest.mark.parametrize(("model", "products", "copies"), [("mixtral", 8, 3), ("qwen2-57b", 16, 7)])
def test_the_highest_tile_multiplies_its_parts_with_what_is_read_once(model: str, products: int, copies: int) -> None:
    for launch in products_of(MODELS[model], 512, torch.bfloat16, False):
        tile, made = dict(launch.arguments), inspect(compile_launch(launch, H200))
        assert (tile["BLOCK_M"], tile["REST_M"]) == (128, 64)
        assert made.spill_bytes == 0
        # Four steps of 16 columns for each part; two copies of x and one of the weight for each stage. With few rows an
        # expert, the loops for one part or the other alone come on top.
        assert made.instructions["wgmma"] == products
        assert made.instructions["tma"] == copies * tile["STAGES"]


def test_streamed_weights_are_loaded_16_bytes_at_once() -> None:
    for launch in products_of(MODELS["deepseek-v3"], 1, torch.bfloat16, False):
        made = inspect(compile_launch(launch, H200)).instructions
        # Four rows of weights, and one of x.
        assert made["ld.global.v4"] >= 5
        assert not {"ld.global.v2", "ld.global.narrow"} & made.keys()

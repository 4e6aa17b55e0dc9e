"""Experts of 8 and 4 bits: through the kernels, interpreted on a CPU and compiled on a GPU, and as machine code."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.aot import CompiledObject, compile_launch
from tk_kernel_core.launch import planning, recording
from tk_kernel_core.resources import inspect
from tk_kernel_core.targets import COMPILE_TARGETS, Target
from tk_moe_dispatch import PackedExperts, fused_experts, fused_experts_torch
from tk_moe_dispatch._launch import max_tiles
from tk_moe_dispatch._packed_launch import packed_layer_config

Tensor = torch.Tensor
H200 = COMPILE_TARGETS["sm_90"]
NAN = float("nan")
GPT_OSS: dict[str, Any] = {"alpha": 1.702, "beta": 1.0, "limit": 1.5}


class Layer:
    """Random experts of some format, with biases, and tokens routed to them, a few of these to nobody."""

    def __init__(
        self,
        n_tokens: int,
        n_experts: int,
        top_k: int,
        sizes: tuple[int, int],
        device: str,
        *,
        dtype: torch.dtype = torch.float16,
        bits: int = 8,
        group_size: int = -1,
        has_zeros: bool = False,
        layout: str = "concat",
    ) -> None:
        self.generator = torch.Generator().manual_seed(n_tokens + n_experts)
        (width, ffn), self.n_experts, self.layout = sizes, n_experts, layout
        self.group_size, self.dtype = group_size, dtype

        def packed(n: int, k: int, layout: Any) -> PackedExperts:
            most, code_dtype = (2**7, torch.int8) if bits == 8 else (2**3, torch.uint8)
            lowest = -most if bits == 8 else 0
            groups = () if bits == 8 else (1 if group_size == -1 else -(-k // group_size),)

            def integers(*shape: int, more: int = 0) -> Tensor:
                return torch.randint(lowest, lowest + 2 * most + more, shape, generator=self.generator).to(code_dtype)

            codes, scales = integers(n_experts, n, k), self.random(n_experts, n, *groups).abs() + 0.5
            zeros = integers(n_experts, n, *groups, more=bits == 4) if has_zeros else None
            scales = (scales / (most * k**0.5)).to(torch.float32 if bits == 8 else dtype)
            make = PackedExperts.from_int8 if bits == 8 else PackedExperts.from_int4
            sizes = () if bits == 8 else (group_size,)
            return make(codes, scales, zeros, *sizes, layout=layout).to(device)

        self.w13, self.w2 = packed(2 * ffn, width, layout), packed(width, ffn, None)
        self.x = self.random(n_tokens, width).to(device, dtype)
        ids = [torch.randperm(n_experts, generator=self.generator)[:top_k] for _ in range(n_tokens)]
        self.ids = torch.stack(ids).to(device)
        self.ids[-1, 0] = -1
        self.weights = torch.rand(n_tokens, top_k, generator=self.generator).to(device) + 0.5
        # What is multiplied by nothing may be anything.
        self.weights[self.ids < 0] = NAN
        self.biases = {"w13_bias": self.random(n_experts, 2 * ffn), "w2_bias": self.random(n_experts, width)}
        self.biases = {name: bias.to(device, dtype) for name, bias in self.biases.items()}

    def random(self, *shape: int) -> Tensor:
        return torch.randn(shape, generator=self.generator)

    def __call__(self, **options: Any) -> Tensor:
        return fused_experts(self.x, self.w13, self.w2, self.weights, self.ids, layout=self.layout, **options)

    def check(self, got: Tensor, **options: Any) -> None:
        """Compare with the formula in float64, up to what the roundings inside and of the result can make."""

        doubles = {
            name: value.double() if isinstance(value, Tensor) and value.is_floating_point() else value
            for name, value in options.items()
        }
        dense = (weight.dequantize(torch.float64) for weight in (self.w13, self.w2))
        routed = self.weights.double(), self.ids
        want = fused_experts_torch(self.x.double(), *dense, *routed, layout=self.layout, **doubles)
        assert got.dtype == self.x.dtype
        # Up to six roundings, of half a unit each, of terms that are as large as results on average.
        size = want.square().mean().sqrt()
        excess = (got.double() - want).abs() - 3 * torch.finfo(got.dtype).eps * (want.abs() + size)
        assert float(excess.max()) <= 0.0


# One token; so few that experts are read for each alone; some; dozens for an expert; more than a hundred.
CASES: dict[str, dict[str, Any]] = {
    "token": {"shape": (1, 3, 2, (136, 24)), "bits": 8},
    # Three steps of 128 columns, not whole turns of the loop; two programs share two of the down projection.
    "one": {"shape": (1, 4, 2, (300, 136)), "bits": 4, "group_size": 128, "has_zeros": True, "with": GPT_OSS},
    "two": {"shape": (2, 32, 2, (40, 24)), "bits": 4, "group_size": 32, "has_zeros": True, "dtype": torch.bfloat16},
    "five": {"shape": (5, 3, 2, (130, 37)), "bits": 8, "has_zeros": True, "dtype": torch.bfloat16, "with": {}},
    "dozens": {"shape": (40, 2, 1, (140, 40)), "bits": 4, "group_size": 256, "layout": "interleaved", "with": {}},
    "hundreds": {"shape": (140, 2, 1, (40, 24)), "bits": 4, "group_size": -1, "has_zeros": True},
}


def layer_of(case: str, device: str) -> tuple[Layer, dict[str, Any]]:
    """Return a layer, and what it is called with: biases where its case names other options."""
    settings = dict(CASES[case])
    options = settings.pop("with", None)
    layer = Layer(*settings.pop("shape"), device, **settings)
    return layer, {} if options is None else {**options, **layer.biases}


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", CASES)
def test_packed_experts_are_applied_and_summed_up(case: str, device: str) -> None:
    layer, options = layer_of(case, device)
    layer.check(layer(**options), **options)


@pytest.mark.usefixtures("poisoned_memory")
@pytest.mark.parametrize("case", ["two", "five"])
def test_absent_experts_and_those_without_tokens_are_not_read(case: str, device: str) -> None:
    layer, options = layer_of(case, device)
    n_experts = layer.n_experts
    expert_map = torch.arange(n_experts, dtype=torch.int32, device=device).roll(1)
    expert_map[0] = -1
    if case == "five":
        shared = (layer.random(16, layer.x.shape[1]) / 6).to(layer.x), (layer.random(130, 8) / 3).to(layer.x)
        options |= dict(zip(("shared_w13", "shared_w2"), shared, strict=True))
    options["expert_map"] = expert_map
    got = layer(**options)
    layer.check(got, **options)
    unused = torch.ones(n_experts, dtype=torch.bool, device=device)
    local = expert_map[layer.ids[layer.ids >= 0]]
    unused[local[local >= 0].long()] = False
    assert unused.any()
    for weight in (layer.w13, layer.w2):
        weight.scales[unused] = NAN
    assert torch.equal(layer(**options), got)
    # Nobody has an expert: what is left is that of all.
    nobody = {"expert_map": torch.full_like(expert_map, -1)}
    assert torch.equal(layer(**nobody), torch.zeros_like(got))


def test_the_first_tokens_find_room_and_later_ones_do_not(device: str) -> None:
    # Few enough to be read one by one, if experts took them all.
    layer = Layer(2, 32, 2, (40, 16), device)
    layer.ids[:, 0] = 2
    layer.weights.fill_(1.0)
    got = layer(capacity_factor=1.0)
    layer.ids[1:, 0] = -1
    assert torch.equal(got, layer(capacity_factor=1.0))
    layer.check(got)


def test_infinities_stay_in_their_tokens_and_padding_of_a_large_scale_counts_for_nothing(device: str) -> None:
    layer = Layer(2, 2, 1, (100, 24), device, bits=4, group_size=64, has_zeros=True)
    layer.ids.fill_(1)
    layer.weights.fill_(1.0)
    layer.x[0, 3] = float("inf")
    spoilt = layer()
    assert not spoilt[0].isfinite().any()
    assert spoilt[1].isfinite().all()
    # Codes of 0 with a zero point of 0, but for the padding: 8 times the scale is beyond float16.
    codes, scales = torch.zeros(2, 100, 24, dtype=torch.uint8), torch.full((2, 100, 1), 10_000.0).half()
    zeros = torch.zeros(2, 100, 1, dtype=torch.uint8)
    layer.w2 = PackedExperts.from_int4(codes, scales, zeros, 64).to(device)
    assert not layer()[1].any()


def test_no_tokens(device: str) -> None:
    layer = Layer(2, 3, 2, (40, 16), device)
    layer.x, layer.ids, layer.weights = layer.x[:0], layer.ids[:0], layer.weights[:0]
    assert layer().shape == (0, 40)


MODELS = {"mixtral": (8, 2, 4096, 14_336), "deepseek-v3": (256, 8, 7168, 2048)}
FORMATS = [(8, -1, False), (8, -1, True), (4, 128, True), (4, 32, True), (4, -1, False)]


def machine_code(
    model: str, n_tokens: int, form: tuple[int, int, bool], dtype: torch.dtype, target: Target
) -> list[CompiledObject]:
    """Compile both products, with biases."""
    n_experts, top_k, hidden, ffn = MODELS[model]
    bits, group_size, has_zeros = form

    def new(*shape: int, kind: torch.dtype = dtype) -> Tensor:
        return torch.empty(shape, dtype=kind, device="meta")

    def packed(n: int, k: int, layout: Any) -> PackedExperts:
        tiles, words = (n_experts, n // 16), (2, 32, 4) if bits == 8 else (32, 4)
        codes = new(*tiles, k // 64, *words, kind=torch.int32)
        scales = new(*tiles, 1 if group_size == -1 else k // group_size, 8, 2)
        scales = scales.float() if bits == 8 else scales
        zeros = new(*scales.shape, kind=torch.int8 if bits == 8 else torch.uint8) if has_zeros else None
        return PackedExperts(codes, scales, zeros, group_size, n, k, layout)

    with planning(target) as launches:
        fused_experts(
            new(n_tokens, hidden),
            packed(2 * ffn, hidden, "concat"),
            packed(hidden, ffn, None),
            new(n_tokens, top_k, kind=torch.float32),
            new(n_tokens, top_k, kind=torch.int64),
            w13_bias=new(n_experts, 2 * ffn),
            w2_bias=new(n_experts, hidden),
        )
    made = [launch for launch in launches if launch.kernel == "packed_experts_kernel"]
    assert len(made) == 2
    return [compile_launch(launch, target) for launch in made]


@pytest.mark.tested_triton
@pytest.mark.compiler
@pytest.mark.parametrize("form", FORMATS, ids=str)
@pytest.mark.parametrize("n_tokens", [1, 120, 1000])
def test_weights_go_from_memory_to_the_matrix_units_through_registers_alone(
    n_tokens: int, form: tuple[int, int, bool]
) -> None:
    dtype = torch.bfloat16 if form[2] else torch.float16
    for made in machine_code("mixtral", n_tokens, form, dtype, H200):
        found = inspect(made)
        assert found.spill_bytes == found.overwritten_operands == 0
        assert found.instructions["ld.global.v4"] >= 4
        assert found.instructions["wgmma"] == 8 * dict(made.launch.arguments)["UNROLL"]
        assert found.instructions["cp.async.v4" if n_tokens == 1 else "tma"] > 0
        # Whoever arranges tokens lets this kernel begin while the router still runs.
        assert made.assembly.index("griddepcontrol.wait") < made.assembly.index("ld.global")
        before_the_last = made.assembly[: made.assembly.rindex("wgmma.mma_async")]
        moves = re.findall(r"\b(?:ld\.shared|st\.shared|shfl\S*|ldmatrix|stmatrix)", before_the_last)
        # Descriptors are for one warp, which asks for its number.
        assert moves == ([] if n_tokens == 1 else ["shfl.sync.idx.b32"])
        # As many programs at a time as the choice counts on.
        n_programs = 4 if n_tokens == 1 else 2 if made.num_warps == 8 else 3
        assert n_programs * found.registers * found.num_warps * H200.warp_size <= 65_536
        assert n_programs * (found.shared_bytes + 1024) <= H200.shared_bytes


@pytest.mark.compiler
@pytest.mark.parametrize(
    ("name", "unit"), [("sm_80", "mma.sync"), ("sm_100", "tcgen05"), ("gfx942", "v_mfma"), ("gfx950", "v_mfma")]
)
def test_other_gpus_have_room_for_the_products_too(name: str, unit: str) -> None:
    for n_tokens, form in ((4, FORMATS[1]), (1000, FORMATS[2])):
        for made in machine_code("deepseek-v3", n_tokens * 32, form, torch.bfloat16, COMPILE_TARGETS[name]):
            found = inspect(made)
            assert found.spill_bytes == 0
            assert found.instructions[unit] > 0


@given(
    n_tokens=st.one_of(st.integers(1, 600), st.integers(1, 2**27)),
    top_k=st.integers(1, 10),
    n_experts=st.integers(1, 1100),
    sizes=st.tuples(st.integers(1, 2**15), st.integers(1, 2**15)),
    form=st.sampled_from(FORMATS),
    is_bounded=st.booleans(),
    target=st.sampled_from(list(COMPILE_TARGETS.values())),
)
def test_choices_are_what_the_hardware_takes(
    n_tokens: int,
    top_k: int,
    n_experts: int,
    sizes: tuple[int, int],
    form: tuple[int, int, bool],
    is_bounded: bool,
    target: Target,
) -> None:
    bits, group_size, has_zeros = form
    twice = (bits, bits), (group_size, group_size), (has_zeros, has_zeros)
    config = packed_layer_config(n_tokens, top_k, n_experts, *sizes, *twice, is_bounded, target)
    assert config.up.block_m == config.down.block_m
    # One token cannot find an expert full.
    assert not (config.streams and is_bounded and n_tokens > 1)
    assert config.gathers or config.up.descriptors
    n_rows = n_tokens * top_k
    n_row_tiles = n_rows if config.streams else max_tiles(n_rows, n_experts, config.up.block_m)
    hidden, ffn = sizes
    for one, n, k in ((config.up, 2 * -(-ffn // 128) * 128, hidden), (config.down, hidden, ffn)):
        assert one.n_programs == n_row_tiles * -(-n // one.block_n)
        # Blocks of 32 columns, of gate and up at once.
        assert one.block_n % 64 == 0
        n_steps = -(-k // 128)
        own = -(-n_steps // one.split)
        # No program has nothing to do.
        assert own * (one.split - 1) < n_steps <= own * one.split
        assert one.scale_weight or group_size not in (32, 64)
        assert one.descriptors <= (target.name in ("sm_90", "sm_100"))
        assert one.unroll == 1 or not one.descriptors
        assert one.stages * one.unroll * one.block_m * 128 * 2 < target.shared_bytes
    assert config.up.split == 1


def test_the_steps_of_a_layer(device: str) -> None:
    """Few tokens are not sorted, and tokens are copied only for tiles that descriptors read."""

    def kernels(n_tokens: int, n_experts: int) -> list[str]:
        layer = Layer(n_tokens, n_experts, 1, (40, 16), device)
        with recording() as launches:
            layer()
        return [launch.kernel.removesuffix("_kernel") for launch in launches]

    if not kernels(1, 2):
        pytest.skip("the reference serves tensors on the CPU")
    product = ["packed_experts"] * 2
    assert kernels(1, 2) == ["arrange_rows", *product, "combine"]
    assert kernels(2, 2) == ["schedule", "arrange_rows", *product, "combine"]

"""Experts of 8 and 4 bits as they are packed, refused and held by modules. No kernel runs."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tk_kernel_core.packing import by_tiles, int4_words, int8_words
from tk_moe_dispatch import FusedMoE, PackedExperts, fused_experts, fused_experts_torch, moe_router_torch

pytestmark = pytest.mark.compiler

Tensor = torch.Tensor
LAYOUTS = (None, "concat", "interleaved")


def integers(low: int, high: int, *shape: int, dtype: torch.dtype) -> Tensor:
    return torch.randint(low, high, shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def random(*shape: int, dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).to(dtype)


def int8_parts(n: int = 26, k: int = 150) -> tuple[Tensor, Tensor, Tensor]:
    scales = random(3, n, dtype=torch.float32).abs()
    return integers(-128, 128, 3, n, k, dtype=torch.int8), scales, integers(-128, 128, 3, n, dtype=torch.int8)


def int4_parts(n: int = 26, k: int = 150, size: int = 64) -> tuple[Tensor, Tensor, Tensor]:
    groups = 1 if size == -1 else -(-k // size)
    zeros = integers(0, 17, 3, n, groups, dtype=torch.uint8)
    return integers(0, 16, 3, n, k, dtype=torch.uint8), random(3, n, groups), zeros


@pytest.mark.parametrize("layout", LAYOUTS)
def test_int8_experts_stand_for_what_they_were_packed_of(layout: Any) -> None:
    codes, scales, zeros = int8_parts()
    packed = PackedExperts.from_int8(codes, scales, zeros, layout=layout)
    assert (packed.shape, packed.bits, packed.group_size) == ((3, 26, 150), 8, -1)
    assert torch.equal(packed.dequantize(), (codes.float() - zeros[..., None]) * scales[..., None])
    exact = codes.double() * scales.double()[..., None]
    symmetric = PackedExperts.from_int8(list(codes), list(scales), layout=layout)
    assert torch.equal(symmetric.dequantize(torch.float64), exact)
    assert torch.equal(symmetric.dequantize(torch.bfloat16), (codes.float() * scales[..., None]).bfloat16())


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [32, 64, 128, 256, -1])
def test_int4_experts_stand_for_what_they_were_packed_of(size: int, layout: Any) -> None:
    codes, scales, zeros = int4_parts(size=size)
    packed = PackedExperts.from_int4(codes, scales, zeros, size, layout=layout)
    assert (packed.shape, packed.bits, packed.group_size) == ((3, 26, 150), 4, size)
    index = torch.zeros(150, dtype=torch.int64) if size == -1 else torch.arange(150) // size
    assert torch.equal(packed.dequantize(), (codes.float() - zeros.float()[..., index]) * scales.float()[..., index])
    symmetric = PackedExperts.from_int4(list(codes), list(scales), None, size, layout=layout)
    assert torch.equal(symmetric.dequantize(), (codes.float() - 8) * scales.float()[..., index])


def test_an_expert_has_the_layout_of_a_single_weight() -> None:
    codes, scales, zeros = int8_parts(64, 128)
    packed = PackedExperts.from_int8(codes, scales, zeros)
    assert torch.equal(packed.codes[1], int8_words(codes[1]))
    assert torch.equal(packed.scales[1], by_tiles(scales[1, :, None], 1, 64))
    codes, scales, zeros = int4_parts(64, 128)
    packed = PackedExperts.from_int4(codes, scales, zeros, 64)
    assert torch.equal(packed.codes[1], int4_words(codes[1]))
    assert torch.equal(packed.zeros[1], by_tiles(zeros[1], 2, 64))


def test_a_tile_holds_the_same_eight_features_of_gate_and_up() -> None:
    codes = torch.arange(64, dtype=torch.int8)[:, None].expand(64, 128)
    for layout, gate in (("concat", range(8, 16)), ("interleaved", range(16, 32, 2))):
        packed = PackedExperts.from_int8([codes], [torch.ones(64)], layout=layout)
        rows = (packed.codes[0, 1, 0, 0].view(torch.uint8)[:, ::4].int() - 128).view(8, 4, 2, 2)[:, 0, :, 0]
        up = range(40, 48) if layout == "concat" else range(17, 32, 2)
        assert rows.T.tolist() == [list(gate), list(up)]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_weights_are_quantised_to_nearest(layout: Any) -> None:
    weight = random(3, 26, 150)
    weight[1, 5] = 0.0
    packed = PackedExperts.quantize_int8(weight, layout=layout)
    steps = weight.float().abs().amax(-1, keepdim=True) / 127
    assert bool(((packed.dequantize() - weight.float()).abs() <= steps * 0.5001).all())
    for symmetric in (False, True):
        packed = PackedExperts.quantize_int4(list(weight), 64, symmetric=symmetric, layout=layout)
        assert (packed.zeros is None) == symmetric
        groups = torch.nn.functional.pad(weight.float(), (0, 42)).view(3, 26, 3, 64)
        low, high = groups.amin(-1, keepdim=True).clamp(max=0), groups.amax(-1, keepdim=True).clamp(min=0)
        steps = (torch.maximum(-low, high) / 7 if symmetric else (high - low) / 15).expand(groups.shape)
        errors = (packed.dequantize() - weight.float()).abs()
        assert bool((errors <= 0.51 * steps.reshape(3, 26, 192)[..., :150]).all())


WRONG: list[tuple[Any, type[Exception], str]] = [
    (lambda c, s, z: PackedExperts.from_int8(c.int(), s, z), TypeError, r"codes\[0\] must have dtype int8, got int32"),
    (lambda c, s, z: PackedExperts.from_int8(c[:0], s, z), ValueError, "codes must be of as many experts as codes, at"),
    (lambda c, s, z: PackedExperts.from_int8(c, s[:2], z), ValueError, "scales must be of as many experts as codes"),
    (lambda c, s, z: PackedExperts.from_int8(c[0], s, z), ValueError, "scales must be of as many experts as codes"),
    (lambda c, s, z: PackedExperts.from_int8(c, s[:, :5], z), ValueError, r"scales\[0\] must have shape \(26,\)"),
    (lambda c, s, z: PackedExperts.from_int8(c, s, z.int()), TypeError, r"zeros\[0\] must have dtype int8, got int32"),
    (
        lambda c, s, z: PackedExperts.from_int8(c, s / 0.0, z),
        ValueError,
        r"scales\[0\] must be finite in torch.float32",
    ),
    (lambda c, s, z: PackedExperts.from_int8(c, s, z, layout="rows"), ValueError, "layout must be one of 'concat'"),
    (
        lambda c, s, z: PackedExperts.from_int8(c[:, :25], s[:, :25], None, layout="concat"),
        ValueError,
        r"codes\[0\] must have shape \[2 \* F, K\], both at least 1, got \(25, 150\)",
    ),
    (
        lambda c, s, z: PackedExperts.from_int8([c[0], c[1, :, :9], c[2]], s),
        ValueError,
        r"codes\[1\] must have shape \(26, 150\), got \(26, 9\)",
    ),
    (
        lambda c, s, z: PackedExperts.from_int4(c.view(torch.uint8), s[..., None], None, -1),
        ValueError,
        r"codes\[0\] must be within \[0, 15\], got up to 255",
    ),
    (
        lambda c, s, z: PackedExperts.from_int4(c.view(torch.uint8) & 15, s[..., None], None, 48),
        ValueError,
        "group_size must be one of 32, 64, 128, 256, -1, got 48",
    ),
    (
        lambda c, s, z: PackedExperts.from_int4(
            c.view(torch.uint8) & 15, s[..., None], z[..., None].view(torch.uint8), -1
        ),
        ValueError,
        r"zeros\[0\] must be within \[0, 16\]",
    ),
    (lambda c, s, z: PackedExperts.quantize_int8(c), TypeError, "weight must have dtype float16"),
    (lambda c, s, z: PackedExperts.quantize_int4(s[..., None] / 0.0), ValueError, "weight must be finite in float32"),
    (lambda c, s, z: PackedExperts.from_int8(c, s, z).dequantize(torch.int8), ValueError, "dtype must be one of"),
]


@pytest.mark.parametrize(("call", "error", "message"), WRONG)
def test_what_cannot_be_packed_is_named(call: Any, error: type[Exception], message: str) -> None:
    codes, scales, zeros = int8_parts()
    codes[0, 0, 0], zeros[0, 0] = -1, -1
    with pytest.raises(error, match=message):
        call(codes, scales, zeros)


def layer() -> dict[str, Any]:
    w13, w2 = random(4, 2 * 12, 40), random(4, 40, 12)
    return {
        "x": random(5, 40),
        "w13": PackedExperts.quantize_int4(w13, 32, layout="interleaved"),
        "w2": PackedExperts.quantize_int8(w2),
        "topk_weights": random(5, 2, dtype=torch.float32),
        "topk_ids": integers(0, 4, 5, 2, dtype=torch.int64),
        "w13_bias": random(4, 24),
        "layout": "interleaved",
    }


MISFITS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"w2": random(4, 40, 12)}, TypeError, "w2 must be PackedExperts, like the other weight, got Tensor"),
    ({"w13": random(4, 24, 40)}, TypeError, "w13 must be PackedExperts, like the other weight, got Tensor"),
    ({"x": random(5, 41)}, ValueError, r"w2 must have 41 rows for each expert, as x has columns, got \(4, 40, 12\)"),
    ({"x": random(5, 40, dtype=torch.float32)}, TypeError, "x must have dtype float16, bfloat16, got float32"),
    ({"layout": "concat"}, ValueError, "w13 must have been packed with layout='concat', got 'interleaved'"),
    ({"w2": PackedExperts.quantize_int8(random(4, 40, 13))}, ValueError, r"w13 must have shape \(4, 26, 40\)"),
    ({"w2": PackedExperts.quantize_int8(random(3, 40, 12))}, ValueError, r"w13 must have shape \(3, 24, 40\)"),
    (
        {"w2": PackedExperts.quantize_int8(random(4, 40, 12), layout="concat")},
        ValueError,
        "w2 must have been packed with layout=None, got 'concat'",
    ),
    ({"w13_bias": random(4, 23)}, ValueError, r"w13_bias must have shape \(4, 24\), got \(4, 23\)"),
    ({"topk_ids": torch.ones(3, 2).int()}, ValueError, r"topk_ids must have shape \(5, 'top_k'\)"),
    ({"w2": PackedExperts.quantize_int8(random(4, 40, 12)).to("meta")}, ValueError, "w2.codes must be on"),
]


@pytest.mark.parametrize(("change", "error", "message"), MISFITS)
def test_packed_experts_that_do_not_fit_are_named(change: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        fused_experts(**{**layer(), **change})


def test_tensors_of_packed_experts_are_checked_whoever_made_them() -> None:
    arguments = layer()
    w2 = arguments["w2"]
    for name, value, error, message in (
        ("scales", w2.scales.half(), TypeError, "w2.scales must have dtype float32, got float16"),
        ("scales", w2.scales[:, :1], ValueError, r"w2.scales must have shape \(4, 4, 1, 8, 2\)"),
        ("codes", w2.codes[:, :1], ValueError, r"w2.codes must have shape \(4, 4, 2, 2, 32, 4\)"),
        ("codes", w2.codes.transpose(4, 5).contiguous().transpose(4, 5), ValueError, "w2.codes must be contiguous"),
        ("zeros", w2.scales, TypeError, "w2.zeros must have dtype int8, got float32"),
    ):
        parts: dict[str, Any] = {"codes": w2.codes, "scales": w2.scales, "zeros": None, name: value}
        arguments["w2"] = PackedExperts(**parts, group_size=-1, out_features=40, in_features=12, layout=None)
        with pytest.raises(error, match=message):
            fused_experts(**arguments)


def test_a_module_holds_packed_experts() -> None:
    arguments, router = layer(), random(4, 40)
    w13, w2, x = arguments["w13"], arguments["w2"], arguments["x"]
    made = FusedMoE.from_weights(
        router, w13, w2, 2, renormalize=True, layout="interleaved", w13_bias=arguments["w13_bias"]
    )
    assert (made.num_experts, made.hidden_size, made.intermediate_size) == (4, 40, 12)
    assert list(made.state_dict()) == [
        "router_weight",
        "w13_bias",
        *("w13.codes", "w13.scales", "w13.zeros", "w2.codes", "w2.scales"),
    ]
    ids, weights, _ = moe_router_torch(x.double(), router.double(), 2, renormalize=True)
    dense = (part.dequantize(torch.float64) for part in (w13, w2))
    bias = arguments["w13_bias"].double()
    want = fused_experts_torch(x.double(), *dense, weights, ids, layout="interleaved", w13_bias=bias)
    y = made(x)
    torch.testing.assert_close(y.double(), want, atol=2e-2, rtol=2e-3)
    # Another dtype is for what else there is.
    converted = made.to(torch.bfloat16)
    assert converted.w2.scales.dtype == torch.float32
    assert converted.w13.scales.dtype == torch.float16
    assert converted.router_weight.dtype == torch.bfloat16
    assert converted(x.bfloat16()).dtype == torch.bfloat16
    assert "w2): PackedExperts(shape=(4, 40, 12), bits=8, group_size=-1" in repr(made)
    with pytest.raises(TypeError, match="w2 must be PackedExperts, like the other weight, got Parameter"):
        FusedMoE.from_weights(router, w13, random(4, 40, 12), 2)
    with pytest.raises(ValueError, match="w13 must have the 5 experts of router_weight, got 4"):
        FusedMoE.from_weights(random(5, 40), w13, w2, 2, layout="interleaved")


def test_the_operator_is_the_function() -> None:
    torch._dynamo.reset()
    arguments = layer()
    compiled = torch.compile(fused_experts, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(**arguments), fused_experts(**arguments))
    w13, w2 = arguments["w13"], arguments["w2"]
    tensors = (w13.codes, w13.scales, w13.zeros, w2.codes, w2.scales, w2.zeros)
    routed = arguments["topk_weights"], arguments["topk_ids"], None, arguments["w13_bias"], None, None, None
    operands = (arguments["x"], *tensors, *routed, 12, 32, -1, "interleaved", 1.0, 0.0, None, None)
    tests = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    torch.library.opcheck(torch.ops.tk_moe_dispatch.fused_packed_experts.default, operands, test_utils=tests)
    with pytest.raises(NotImplementedError, match="tk_moe_dispatch::fused_packed_experts has no derivative"):
        fused_experts(**{**arguments, "x": arguments["x"].requires_grad_()})

"""Results written into a given tensor: fresh, strided or in place."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tk_swiglu import swiglu_fused, swiglu_packed, swiglu_with_bias
from tk_testkit.strategies import assert_guards_intact, floating_dtypes, guarded_view, shapes, strides_for

PACKINGS = list(itertools.product(("concat", "interleaved"), ("gate_first", "up_first")))
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 7.0}


def random(*shape: int, dtype: torch.dtype = torch.float32, device: str, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("width", [1, 40, 353])
@pytest.mark.usefixtures("poisoned_memory")
def test_every_form_writes_a_fresh_tensor(width: int, dtype: torch.dtype, device: str) -> None:
    gate, up = random(2, 3, width, dtype=dtype, device=device)
    x = random(3, 2 * width, dtype=dtype, device=device, seed=1)
    biases = random(2, width, dtype=torch.float32, device=device, seed=2)
    for activation in (
        lambda **out: swiglu_fused(gate, up, **out),
        lambda **out: swiglu_with_bias(gate, up, *biases, **GPT_OSS, **out),
        *(
            lambda layout=layout, order=order, **out: swiglu_packed(
                x, biases.flatten(), layout=layout, order=order, **GPT_OSS, **out
            )
            for layout, order in PACKINGS
        ),
    ):
        want = activation()
        for strides, offset in (((width, 1), 0), ((width + 5, 1), 1), ((2 * width, 2), 0), ((1, 3), 1)):
            out = guarded_view((3, width), strides, dtype, device=device, seed=3, offset=offset)
            assert activation(out=out) is out
            assert torch.equal(out, want)
            assert_guards_intact(out)


@settings(max_examples=25)
@given(data=st.data(), shape=shapes(max_rank=4, max_elements=2048), dtype=floating_dtypes())
def test_any_layout_of_out_property(
    device: str, data: st.DataObject, shape: tuple[int, ...], dtype: torch.dtype
) -> None:
    gate, up, out = (
        guarded_view(shape, data.draw(strides_for(shape)), dtype, device=device, seed=seed) for seed in (0, 1, 2)
    )
    want = swiglu_fused(gate.contiguous(), up.contiguous())
    swiglu_fused(gate, up, out=out)
    assert torch.equal(out, want)
    assert_guards_intact(out)
    # In place, wherever the elements are.
    swiglu_fused(gate, up, out=gate)
    assert torch.equal(gate, want)
    for view in (gate, up):
        assert_guards_intact(view)


def pairs(device: str) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    wide, columns = random(5, 704, device=device), random(2, 352, 5, device=device)
    heads = random(5, 4, 32, device=device)
    return {
        "dense": (random(5, 352, device=device), random(5, 352, device=device, seed=1)),
        "halves": tuple(wide.chunk(2, -1)),
        "transposed": (columns[0].t(), columns[1].t()),
        "heads": tuple(heads.chunk(2, -1)),
        "one dimension": tuple(random(2, 352, device=device)),
        "expanded partner": (random(5, 352, device=device), random(352, device=device, seed=1).expand(5, 352)),
    }


@pytest.mark.parametrize("which", [0, 1])
@pytest.mark.parametrize("name", list(pairs("cpu")))
def test_in_place_on_gate_or_up(name: str, which: int, device: str) -> None:
    if which == 1 and name == "expanded partner":
        gate, up = reversed(pairs(device)[name])
    else:
        gate, up = pairs(device)[name]
    biases = random(2, gate.shape[-1], device=device, seed=4)
    other = (up, gate)[which]
    before = other.clone()
    want = swiglu_with_bias(gate.contiguous(), up.contiguous(), *biases, **GPT_OSS)
    out = (gate, up)[which]
    # A view of its own is the same elements too.
    assert swiglu_with_bias(gate, up, *biases, **GPT_OSS, out=out[:]).data_ptr() == out.data_ptr()
    assert torch.equal(out, want)
    assert torch.equal(other, before)


def test_in_place_where_gate_is_up(device: str) -> None:
    gate = random(5, 352, device=device)
    want = swiglu_fused(gate, gate.clone())
    assert swiglu_fused(gate, gate, out=gate) is gate
    assert torch.equal(gate, want)


@pytest.mark.parametrize("pitch", [704, 720, 711])
@pytest.mark.parametrize("half", [0, 1])
@pytest.mark.parametrize("order", ["gate_first", "up_first"])
def test_in_place_on_a_half_of_a_concatenation(order: str, half: int, pitch: int, device: str) -> None:
    x = guarded_view((5, 704), (pitch, 1), device=device)
    before = x.clone()
    want = swiglu_packed(before, order=order, **GPT_OSS)
    out = x.chunk(2, -1)[half]
    assert swiglu_packed(x, order=order, **GPT_OSS, out=out) is out
    assert torch.equal(out, want)
    assert torch.equal(x.chunk(2, -1)[1 - half], before.chunk(2, -1)[1 - half])
    assert_guards_intact(x)


@pytest.mark.parametrize("half", [0, 1])
def test_in_place_on_a_half_of_what_must_be_copied(half: int, device: str) -> None:
    x = random(64, 5, device=device).t()
    want = swiglu_packed(x.contiguous())
    out = x.chunk(2, -1)[half]
    swiglu_packed(x, out=out)
    assert torch.equal(out, want)


def test_one_row_in_place(device: str) -> None:
    x = random(64, device=device)
    want = swiglu_packed(x)
    swiglu_packed(x, out=x[32:])
    assert torch.equal(x[32:], want)


def test_memory_beside_the_inputs_is_free_to_write(device: str) -> None:
    buffer = random(5, 3 * 64, device=device)
    want = swiglu_packed(buffer[:, :128].clone())
    swiglu_packed(buffer[:, :128], out=buffer[:, 128:])
    assert torch.equal(buffer[:, 128:], want)
    gate, up, out = random(3, 5, 64, device=device)
    swiglu_fused(gate, up, out=out)
    assert torch.equal(out, swiglu_fused(gate, up))
    bias = random(7, 64, device=device)
    want = swiglu_with_bias(gate, up, *bias[:2].clone())
    swiglu_with_bias(gate, up, *bias[:2], out=bias[2:])
    assert torch.equal(bias[2:], want)


def refused(device: str) -> dict[str, tuple[object, torch.Tensor, str]]:
    rows, wide = random(9, 8, device=device), random(4, 32, device=device)
    gate, up = random(2, 4, 8, device=device)
    x = random(4, 16, device=device)
    narrow = random(1, 8, device=device).expand(4, 8)
    overlapping = random(40, device=device).as_strided((4, 8), (4, 1))
    biases = random(9, 8, device=device)
    shared = "out must not share memory with {} unless it is the same elements"
    return {
        "the row after gate": (lambda: swiglu_fused(rows[:4], up, out=rows[1:5]), rows, shared.format("gate")),
        "the row before gate": (lambda: swiglu_fused(rows[1:5], up, out=rows[:4]), rows, shared.format("gate")),
        "the row after up": (lambda: swiglu_fused(gate, rows[:4], out=rows[1:5]), rows, shared.format("up")),
        "columns of gate": (lambda: swiglu_fused(wide[:, :8], up, out=wide[:, 4:12]), wide, shared.format("gate")),
        "columns of up": (lambda: swiglu_fused(gate, wide[:, 4:12], out=wide[:, :8]), wide, shared.format("up")),
        "every other row": (lambda: swiglu_fused(rows[1:5], up, out=rows[::2][:4]), rows, shared.format("gate")),
        "gate's start": (lambda: swiglu_fused(rows[:4], up, out=rows[:8:2]), rows, shared.format("gate")),
        "gate reversed": (
            lambda: swiglu_fused(wide[:, :4], up[:, :4], out=wide[:, :4].t()),
            wide,
            shared.format("gate"),
        ),
        "a bias": (lambda: swiglu_with_bias(gate, up, biases[2], up[0], out=biases[:4]), biases, "bias_gate"),
        "the other bias": (lambda: swiglu_with_bias(gate, up, up[0], biases[2], out=biases[:4]), biases, "bias_up"),
        "a packed bias": (
            lambda: swiglu_packed(x, biases[:2].flatten(), out=biases[1:5]),
            biases,
            shared.format("bias"),
        ),
        "the middle of x": (lambda: swiglu_packed(x, out=x[:, 4:12]), x, shared.format("x")),
        "rows of x": (lambda: swiglu_packed(rows[:8].view(4, 16), out=rows[:4]), rows, shared.format("x")),
        "a half of a shifted x": (
            lambda: swiglu_packed(wide[:3, :16], out=wide[1:, :8]),
            wide,
            shared.format("x"),
        ),
        "the gates of an interleaved x": (
            lambda: swiglu_packed(x, layout="interleaved", out=x[:, ::2]),
            x,
            shared.format("x"),
        ),
        "the ups of an interleaved x": (
            lambda: swiglu_packed(x, layout="interleaved", out=x[:, 1::2]),
            x,
            shared.format("x"),
        ),
        "a half of an interleaved x": (
            lambda: swiglu_packed(x, layout="interleaved", out=x[:, :8]),
            x,
            shared.format("x"),
        ),
        "every other column of a concatenation": (lambda: swiglu_packed(x, out=x[:, ::2]), x, shared.format("x")),
        # They lie apart, but that is not looked at so closely.
        "alternating columns": (
            lambda: swiglu_fused(wide[:, ::2], wide[:, 1::2], out=wide[:, ::2]),
            wide,
            shared.format("up"),
        ),
        "expanded": (lambda: swiglu_fused(gate, up, out=narrow), narrow, "out is written in place and must not be"),
        "expanded gate": (lambda: swiglu_fused(narrow, up, out=narrow), narrow, "out is written in place"),
        "overlapping itself": (
            lambda: swiglu_fused(gate, up, out=overlapping),
            overlapping,
            "out is written in place and must not be expanded or overlap itself",
        ),
    }


@pytest.mark.parametrize("name", list(refused("cpu")))
def test_memory_that_cannot_be_written_is_refused_and_left_alone(name: str, device: str) -> None:
    call, memory, message = refused(device)[name]
    before = memory.clone()
    for _ in range(2):
        with pytest.raises(ValueError, match=message):
            call()
    assert torch.equal(memory, before)


def test_the_same_strides_at_other_addresses_are_checked_again(device: str) -> None:
    rows, up = random(9, 8, device=device), random(4, 8, device=device, seed=1)
    for _ in range(2):
        swiglu_fused(rows[:4], up, out=rows[4:8])
        with pytest.raises(ValueError, match="out must not share memory with gate"):
            swiglu_fused(rows[:4], up, out=rows[3:7])
        swiglu_fused(rows[:4], up, out=rows[:4])


@settings(max_examples=100)
@given(
    rows=st.integers(1, 4),
    width=st.integers(1, 5),
    pitches=st.tuples(*[st.integers(5, 12)] * 2),
    starts=st.tuples(*[st.integers(0, 40)] * 2),
    which=st.sampled_from(("gate", "up")),
)
def test_shared_memory_property(
    rows: int, width: int, pitches: tuple[int, int], starts: tuple[int, int], which: str
) -> None:
    buffer, addresses = random(128, device="cpu"), torch.arange(128)
    taken, out = (
        buffer.as_strided((rows, width), (pitch, 1), start) for pitch, start in zip(pitches, starts, strict=True)
    )
    left, right = (
        addresses.as_strided(view.shape, view.stride(), view.storage_offset()).flatten().tolist()
        for view in (taken, out)
    )
    other = random(rows, width, device="cpu", seed=1)
    arguments = (taken, other) if which == "gate" else (other, taken)
    want, before = swiglu_fused(*(argument.clone() for argument in arguments)), buffer.clone()
    try:
        swiglu_fused(*arguments, out=out)
        refused = False
    except ValueError:
        refused = True
    if refused:
        assert torch.equal(buffer, before)
        assert left != right
        # Views with different pitches whose extents meet are refused without looking closer.
        assert set(left) & set(right) or (
            pitches[0] != pitches[1] and max(left) >= min(right) and max(right) >= min(left)
        )
    else:
        assert left == right or not set(left) & set(right)
        assert torch.equal(out, want)
        before.as_strided(out.shape, out.stride(), out.storage_offset()).copy_(want)
        assert torch.equal(buffer, before)


def test_autograd_sees_the_write(device: str) -> None:
    gate, up = random(2, 4, 64, device=device)
    for activation in (
        lambda out: swiglu_fused(gate, up, out=out),
        lambda out: swiglu_packed(torch.cat((gate, up), -1), out=out),
        lambda out: swiglu_fused(gate.t(), up.t(), out=out.t()),
    ):
        hidden = random(4, 64, device=device, seed=1).requires_grad_() * 1
        loss = (hidden * hidden).sum()
        out = hidden.detach()
        version = out._version
        activation(out)
        assert out._version > version
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()
    version = gate._version
    swiglu_fused(gate, up, out=gate)
    assert gate._version > version
    empty = torch.empty(0, 4, device=device)
    assert swiglu_fused(empty, empty, out=empty) is empty
    with torch.inference_mode():
        out = torch.empty(4, 64, device=device)
        swiglu_fused(torch.ones(4, 64, device=device), torch.ones(4, 64, device=device), out=out)
        swiglu_fused(out, up, out=out)
    with pytest.raises(RuntimeError, match="out is an inference tensor and must not be written outside"):
        swiglu_fused(up, up, out=out)


def test_in_place_means_the_same_dtype_too(device: str) -> None:
    gate = torch.randn(4, 64, dtype=torch.float16, device=device)
    up = torch.randn(4, 64, device=device)
    # Where up starts, and with its strides, but in elements of half the size.
    out = up.flatten().view(torch.float16)[: 4 * 64].view(4, 64)
    with pytest.raises(ValueError, match="out must not share memory with up"):
        swiglu_fused(gate, up, out=out)


def test_gradients_and_out_exclude_each_other(device: str) -> None:
    gate, up = random(2, 4, 64, device=device)
    biases, x = random(2, 64, device=device), random(4, 128, device=device)
    out = torch.full_like(gate, 3.0)
    for wanted in (gate, up, biases, x, out):
        wanted.requires_grad_()
        for tensors, activation in (
            ((gate, up), lambda: swiglu_fused(gate, up, out=out)),
            ((gate, up, biases), lambda: swiglu_with_bias(gate, up, *biases, out=out)),
            ((x, biases), lambda: swiglu_packed(x, biases.flatten(), out=out)),
        ):
            if not any(wanted is tensor for tensor in (*tensors, out)):
                continue
            with pytest.raises(RuntimeError, match="out cannot be combined with gradients"):
                activation()
            assert bool((out == 3.0).all())
            with torch.no_grad():
                assert activation() is out
                out.fill_(3.0)
        wanted.requires_grad_(False)


@pytest.mark.parametrize("target", ["fresh", "strided", "gate", "up"])
def test_out_compiles(target: str, device: str) -> None:
    torch._dynamo.reset()

    def layer(gate: torch.Tensor, up: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        result = swiglu_fused(gate * 2 if target == "fresh" else gate, up, out=out, **GPT_OSS)
        return result + out

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend="aot_eager")
    for rows in (3, 8, 5):
        results = []
        for function in (layer, compiled):
            gate, up, other = random(3, rows, 64, device=device)
            wide = random(rows, 128, device=device)
            out = {"fresh": other, "strided": wide[:, 32:96], "gate": gate, "up": up}[target]
            results.append((function(gate, up, out), gate, up, other, wide))
        for want, got in zip(*results, strict=True):
            assert torch.equal(got, want)


def test_half_of_a_concatenation_compiles(device: str) -> None:
    torch._dynamo.reset()

    def layer(x: torch.Tensor) -> torch.Tensor:
        return swiglu_packed(x, out=x[:, 32:]) * 2

    x = random(5, 64, device=device)
    eager_x = x.clone()
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(eager_x))
    assert torch.equal(x, eager_x)


def test_meta_tensors_come_back_as_they_are() -> None:
    gate, out = torch.empty(4, 64, device="meta"), torch.empty(64, 4, device="meta").t()
    assert swiglu_fused(gate, gate, out=out) is out
    x = torch.empty(4, 128, device="meta")
    assert swiglu_packed(x, out=out) is out

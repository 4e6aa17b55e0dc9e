"""The registered operators: schemas, fake tensors, torch.compile, functional transforms."""

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from tk_rmsnorm import fused_add_rmsnorm, fused_add_rmsnorm_, rmsnorm, rmsnorm_residual_fused

NUMBERS = (1e-6, 0.0, "fp32")


def samples(device: str) -> dict[str, tuple[object, ...]]:
    x, residual, weight = (torch.randn(3, 64, device=device) for _ in range(3))
    weight = weight[0].contiguous()
    wanted = x.clone().requires_grad_(), residual.clone().requires_grad_(), weight.clone().requires_grad_()
    return {
        "rmsnorm": (wanted[0], wanted[2], *NUMBERS),
        "rmsnorm_residual": (*wanted, *NUMBERS),
        "fused_add_rmsnorm": (*wanted, *NUMBERS),
        "fused_add_rmsnorm_": (x, residual, weight, *NUMBERS),
        "rmsnorm_backward": (x, residual, x, weight, *NUMBERS, True),
    }


@pytest.mark.parametrize("name", list(samples("cpu")))
def test_opcheck(name: str, device: str) -> None:
    torch.library.opcheck(getattr(torch.ops.tk_rmsnorm, name).default, samples(device)[name])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("make", [lambda x: x, lambda x: x.transpose(0, 1), lambda x: x[:, ::2]])
def test_fake_tensors_match_real_ones(make: object, dtype: torch.dtype, device: str) -> None:
    real = make(torch.randn(4, 6, 64, dtype=dtype, device=device))
    weight = torch.randn(64, device=device)
    with FakeTensorMode() as mode:
        fake, fake_weight = mode.from_tensor(real), mode.from_tensor(weight)
        fakes = [rmsnorm(fake, fake_weight), *fused_add_rmsnorm(fake, fake, fake_weight)]
    reals = [rmsnorm(real, weight), *fused_add_rmsnorm(real, real, weight)]
    for got, want in zip(fakes, reals, strict=True):
        assert (got.shape, got.dtype, got.stride(), got.device) == (want.shape, want.dtype, want.stride(), want.device)


def test_meta_tensors_give_meta_tensors() -> None:
    y = rmsnorm(torch.empty(4, 64, device="meta"), torch.empty(64, device="meta"))
    assert (y.device.type, tuple(y.shape)) == ("meta", (4, 64))


def test_compile_without_graph_breaks_for_any_number_of_rows(device: str) -> None:
    torch._dynamo.reset()
    compilations = 0

    def count(graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> object:
        nonlocal compilations
        compilations += 1
        return graph.forward

    def layer(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        y, total = fused_add_rmsnorm(x, residual, weight)
        return rmsnorm(y, weight, casting="llama"), rmsnorm_residual_fused(total, x), total

    compiled = torch.compile(layer, fullgraph=True, dynamic=True, backend=count)
    weight = torch.randn(64, device=device)
    for tokens in (7, 512, 1, 0, 33):
        x, residual = torch.randn(2, tokens, 64, device=device)
        for got, want in zip(compiled(x, residual, weight), layer(x, residual, weight), strict=True):
            assert torch.equal(got, want)
    assert compilations <= 3


def test_compiled_gradients(device: str) -> None:
    torch._dynamo.reset()
    compiled = torch.compile(lambda x, weight: rmsnorm(x, weight).square().sum(), fullgraph=True, backend="aot_eager")
    x, weight = torch.randn(5, 64, device=device), torch.randn(64, device=device)
    gradients = []
    for function in (compiled, lambda x, weight: rmsnorm(x, weight).square().sum()):
        leaves = x.clone().requires_grad_(), weight.clone().requires_grad_()
        gradients.append(torch.autograd.grad(function(*leaves), leaves))
    assert all(torch.equal(got, want) for got, want in zip(*gradients, strict=True))


def test_compiled_in_place_update_of_views(device: str) -> None:
    torch._dynamo.reset()

    def layer(base: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        fused_add_rmsnorm_(base[0], base[1], weight)
        return base * 2

    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    base, weight = torch.randn(2, 5, 64, device=device), torch.randn(64, device=device)
    eager_base = base.clone()
    assert torch.equal(compiled(base, weight), layer(eager_base, weight))
    assert torch.equal(base, eager_base)


def test_compile_reports_bad_arguments() -> None:
    torch._dynamo.reset()
    compiled = torch.compile(rmsnorm, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"weight must have shape \(64,\), got \(63,\)"):
        compiled(torch.randn(2, 64), torch.randn(63))


def test_a_mode_sees_the_operator(device: str) -> None:
    from torch.utils._python_dispatch import TorchDispatchMode

    class Recorder(TorchDispatchMode):
        def __init__(self) -> None:
            super().__init__()
            self.names: list[str] = []

        def __torch_dispatch__(self, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            self.names.append(str(func))
            return func(*args, **(kwargs or {}))

    with Recorder() as recorder:
        rmsnorm(torch.ones(2, 8, device=device))
    assert "tk_rmsnorm.rmsnorm.default" in recorder.names


def test_tangents_are_refused_not_dropped(device: str) -> None:
    x = torch.randn(2, 8, device=device)
    with pytest.raises(NotImplementedError, match="forward-mode differentiation is not implemented"):
        torch.func.jvp(rmsnorm, (x,), (x,))
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(x, x)
        with pytest.raises(NotImplementedError, match="forward-mode differentiation is not implemented"):
            fused_add_rmsnorm(x, dual)
        # Other tensors are served as ever.
        assert torch.equal(rmsnorm(x), rmsnorm(x.clone()))

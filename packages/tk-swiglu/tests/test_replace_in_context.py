"""What surrounds a call of replace_swiglu does not change what it finds."""

import contextlib
from collections.abc import Iterator
from contextlib import AbstractContextManager

import pytest
import torch
from torch.nn import functional

from tk_swiglu import replace_swiglu


class PackedMLP(torch.nn.Module):
    """A gated MLP whose second half is the gate."""

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = torch.nn.Linear(24, 80)
        self.down_proj = torch.nn.Linear(40, 24)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        up, gate = self.gate_up_proj(x).chunk(2, -1)
        return self.down_proj(functional.silu(gate) * up)


@contextlib.contextmanager
def default_dtype(dtype: torch.dtype) -> Iterator[None]:
    previous = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    yield
    torch.set_default_dtype(previous)


@pytest.mark.parametrize(
    "context",
    [
        torch.device("meta"),
        torch.inference_mode(),
        torch.no_grad(),
        torch.autocast("cpu", dtype=torch.bfloat16),
        default_dtype(torch.bfloat16),
        default_dtype(torch.float64),
    ],
    ids=["device", "inference", "no gradients", "autocast", "bfloat16", "float64"],
)
def test_the_context_of_the_caller_does_not_matter(context: AbstractContextManager[object]) -> None:
    model = torch.nn.Sequential(PackedMLP())
    with context:
        assert replace_swiglu(model) == ["0"]
    assert model[0].order == "up_first"
    assert all(parameter.requires_grad for parameter in model.parameters())

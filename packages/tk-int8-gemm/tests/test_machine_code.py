"""What the GEMM kernels are compiled to, for sm_90. No GPU is involved."""

from __future__ import annotations

import re

import pytest
import torch

from tk_int8_gemm._launch import GemmConfig, int8_gemm_config, w8a8_config
from tk_int8_gemm._plans import gemm_launch, quantize_per_token
from tk_kernel_core.aot import CompiledObject, compile_launch
from tk_kernel_core.hazards import overwritten_operands
from tk_kernel_core.launch import planning
from tk_kernel_core.resources import disassemble, inspect
from tk_kernel_core.targets import COMPILE_TARGETS

H200 = COMPILE_TARGETS["sm_90"]
N, K = 11_008, 4096


def compiled(config: GemmConfig, dtype: torch.dtype, *rest: torch.dtype | None) -> CompiledObject:
    """Compile a product of 64 rows; rest are the dtypes of what follows x and the weight."""
    x, weight = torch.empty(64, K, dtype=dtype, device="meta"), torch.empty(N, K, dtype=torch.int8, device="meta")
    tensors = [None if dtype is None else torch.empty(16, dtype=dtype, device="meta") for dtype in rest]
    out = torch.empty(64, N, dtype=torch.float16 if dtype == torch.int8 else dtype, device="meta")
    x_scale = [torch.empty(16, device="meta")] if dtype == torch.int8 else []
    return compile_launch(gemm_launch(config, x, weight, out.dtype).describe(out, x, *x_scale, weight, *tensors), H200)


@pytest.mark.compiler
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("m", "unit"), [(16, "mma.sync"), (64, "wgmma"), (256, "wgmma")])
def test_weight_only_products_load_16_bytes_at_once_and_spill_nothing(dtype: torch.dtype, m: int, unit: str) -> None:
    config = int8_gemm_config(m, N, K, 16, str(dtype).removeprefix("torch."), H200)
    assert isinstance(config, GemmConfig)
    zero_point = torch.float32
    rest = (torch.float32, dtype, zero_point, torch.float32)
    made = compiled(config, dtype, *rest)
    resources = inspect(made)
    assert resources.spill_bytes == 0
    assert unit in resources.instructions
    assert {name for name in resources.instructions if name.startswith("cp.async")} == {"cp.async.v4"}
    assert resources.instructions["st.global.v4"] > 0
    assert resources.overwritten_operands == 0


@pytest.mark.compiler
def test_products_begin_when_what_comes_before_their_quantiser_is_done() -> None:
    # Earlier their programs would crowd on the multiprocessors that are free first.
    with planning(H200) as launches:
        quantize_per_token(torch.empty(16, K, dtype=torch.float16, device="meta"))
    (launch,) = launches
    orders = re.findall(r"griddepcontrol\.(\w+)", compile_launch(launch, H200).assembly)
    assert orders == ["wait", "launch_dependents"]


@pytest.mark.compiler
@pytest.mark.parametrize("m", [16, 64, 192, 256, 2048])
def test_w8a8_products_run_on_int8_units_and_spill_nothing(m: int) -> None:
    config = w8a8_config(m, N, K, 16, H200)
    assert isinstance(config, GemmConfig)
    made = compiled(config, torch.int8, torch.float32, torch.float32, torch.float32, torch.int32)
    resources = inspect(made)
    assert resources.spill_bytes == 0
    assert "wgmma.int8" in resources.instructions
    assert resources.instructions["tma"] > 0
    assert not {name for name in resources.instructions if name.startswith("cp.async.v")}
    # As many programs share a multiprocessor's registers as are launched for it.
    if m == 2048:
        assert config.n_programs == 2 * H200.compute_units
        assert 2 * resources.registers * resources.num_warps * H200.warp_size <= 65_536
        assert 2 * resources.shared_bytes <= H200.shared_bytes


@pytest.mark.compiler
def test_codes_from_registers_into_wgmma_are_not_overwritten() -> None:
    # No choice of the launch module: the form that the kernel's dot must be safe in.
    config = GemmConfig(32, 64, 128, True, 8, 4, 4, False, False, 1, True, "a register operand")
    for dtype in (torch.float16, torch.bfloat16):
        made = compiled(config, dtype, torch.float32)
        listing = disassemble(made.binary)
        assert re.search(r"HGMMA\S* R\d+, R\d+\S*, gdesc", listing)
        assert overwritten_operands(listing) == []

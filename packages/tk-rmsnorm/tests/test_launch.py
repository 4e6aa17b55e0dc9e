"""Launch choices: pure functions, no GPU."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.launch import planning
from tk_kernel_core.targets import COMPILE_TARGETS, Target
from tk_rmsnorm import rmsnorm
from tk_rmsnorm._launch import backward_config, forward_config

targets = st.sampled_from(list(COMPILE_TARGETS.values()))


@given(
    hidden_size=st.one_of(st.just(8192), st.integers(1, 2**21)),
    has_residual=st.booleans(),
    is_light=st.booleans(),
    target=targets,
)
def test_forward_tiles_are_what_the_hardware_takes(
    hidden_size: int, has_residual: bool, is_light: bool, target: Target
) -> None:
    config = forward_config(hidden_size, has_residual, is_light, target)
    for value in (config.block_m, config.block_n, config.num_warps):
        assert value & (value - 1) == 0
    assert 1 <= config.num_warps * target.warp_size <= 1024
    # Two passes need the tile in registers once more, one pass needs all of the row in one tile.
    assert config.block_n >= hidden_size or config.block_m == 1
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    if config.max_registers is not None:
        # AMD's compiler has no such limit. A 16-bit element takes a register once it is fp32, its weight half of one.
        assert target.backend == "cuda"
        assert is_light
        assert config.max_registers >= 1.5 * config.block_m * config.block_n / (config.num_warps * target.warp_size)


backward_problems = given(
    n_rows=st.one_of(st.integers(1, 2**12), st.integers(1, 2**40)),
    hidden_size=st.one_of(st.integers(1, 2**14), st.integers(1, 2**21)),
    # Of `dy` and `x`, and of a further gradient of the sum, each of two or four bytes.
    bytes_per_element=st.integers(2, 12),
    target=targets,
)


@backward_problems
def test_backward_tiles_are_what_the_hardware_takes(
    n_rows: int, hidden_size: int, bytes_per_element: int, target: Target
) -> None:
    config = backward_config(n_rows, hidden_size, bytes_per_element, target)
    for value in (config.block_m, config.block_n, config.num_warps):
        assert value >= 1
        assert value & (value - 1) == 0
    assert config.num_warps * target.warp_size <= 1024
    assert config.stages in (1, 3)
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    # The tile is in registers several times over.
    assert config.block_m * config.block_n <= 64 * config.num_warps * target.warp_size


@pytest.mark.parametrize("target", COMPILE_TARGETS.values(), ids=lambda target: target.name)
@pytest.mark.parametrize("bytes_per_element", range(2, 13))
def test_backward_stages_fit_shared_memory(bytes_per_element: int, target: Target) -> None:
    for hidden_size in (1, 128, 1000, 2048, 4096, 4097, 8192, 16_384):
        config = backward_config(65_536, hidden_size, bytes_per_element, target)
        # Of the stages one is in registers.
        staged_bytes = (config.stages - 1) * config.block_m * config.block_n * bytes_per_element
        assert staged_bytes <= target.shared_bytes
        # Stages that would leave room are not given up where copies to shared memory run by themselves.
        if config.stages == 1 and target.backend == "cuda" and hidden_size <= config.block_n:
            assert 2 * config.block_m * config.block_n * bytes_per_element > target.shared_bytes // 2


@backward_problems
def test_backward_programs_cover_the_rows_and_no_more(
    n_rows: int, hidden_size: int, bytes_per_element: int, target: Target
) -> None:
    config = backward_config(n_rows, hidden_size, bytes_per_element, target)
    # Each program writes a partial weight gradient, so there are few, and none without rows.
    assert 1 <= config.n_programs <= 2 * target.compute_units
    assert (config.n_programs - 1) * config.block_m < n_rows
    assert config.n_programs >= min(-(-n_rows // config.block_m), target.compute_units)


@pytest.mark.parametrize("target", COMPILE_TARGETS.values(), ids=lambda target: target.name)
def test_backward_tiles_do_not_depend_on_the_number_of_rows(target: Target) -> None:
    for hidden_size in (1, 128, 4096, 8192, 8193, 65_536):
        tiles = {
            (config.block_m, config.block_n, config.num_warps, config.stages)
            for config in (backward_config(n_rows, hidden_size, 4, target) for n_rows in (1, 7, 512, 2**20))
        }
        assert len(tiles) == 1


@pytest.mark.parametrize(
    ("hidden_size", "want"),
    [
        (128, (32, 128, 8, 3, 264)),
        (2048, (2, 2048, 4, 3, 264)),
        (4096, (1, 4096, 4, 3, 264)),
        (8192, (1, 8192, 8, 3, 132)),
        (16_384, (2, 4096, 16, 1, 132)),
    ],
)
def test_tuned_backward_choices_on_an_h200(hidden_size: int, want: tuple[int, ...]) -> None:
    config = backward_config(65_536, hidden_size, 4, COMPILE_TARGETS["sm_90"])
    assert (config.block_m, config.block_n, config.num_warps, config.stages, config.n_programs) == want


@pytest.mark.parametrize(
    ("hidden_size", "has_residual", "want"),
    [
        (128, False, (16, 128, 4, None)),
        (4096, False, (1, 4096, 8, None)),
        (8192, False, (1, 8192, 16, 32)),
        (8192, True, (1, 8192, 8, None)),
        (16_384, False, (1, 8192, 16, None)),
        (16_384, True, (1, 16_384, 16, None)),
    ],
)
def test_tuned_choices_on_an_h200(hidden_size: int, has_residual: bool, want: tuple[int | None, ...]) -> None:
    config = forward_config(hidden_size, has_residual, True, COMPILE_TARGETS["sm_90"])
    assert (config.block_m, config.block_n, config.num_warps, config.max_registers) == want


@pytest.mark.parametrize(
    ("dtype", "weight_dtype", "row_stride", "limit"),
    [
        (torch.bfloat16, torch.bfloat16, 8192, 32),
        (torch.float16, None, 8192, 32),
        # These would not fit so few registers: wide elements, and rows whose elements are loaded one by one.
        (torch.bfloat16, torch.float32, 8192, None),
        (torch.float32, torch.float32, 8192, None),
        (torch.bfloat16, torch.bfloat16, 8193, None),
    ],
)
def test_registers_are_bounded_where_a_row_fits_them(
    dtype: torch.dtype, weight_dtype: torch.dtype | None, row_stride: int, limit: int | None
) -> None:
    x = torch.empty(4, row_stride, dtype=dtype, device="meta")[:, :8192]
    weight = None if weight_dtype is None else torch.empty(8192, dtype=weight_dtype, device="meta")
    for name in COMPILE_TARGETS:
        with planning(COMPILE_TARGETS[name]) as launches:
            rmsnorm(x, weight)
        (launch,) = launches
        assert dict(launch.options).get("maxnreg") == (limit if name.startswith("sm_") else None)

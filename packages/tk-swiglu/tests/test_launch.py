"""Launch choices: pure functions, no GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.targets import COMPILE_TARGETS
from tk_swiglu._launch import backward_config, forward_config

LAYOUTS = ("separate", "concat", "interleaved")
targets = st.sampled_from(list(COMPILE_TARGETS.values()))
row_counts = st.integers(1, 2**40)
widths = st.integers(1, 2**21)
# Rows that nothing tells apart are joined to one, which is then as long as the tensor.
joined_widths = st.one_of(widths, st.integers(1, 2**38))


def assert_the_hardware_takes_it(tile: int, config: object, target: object) -> None:
    for value in (tile, config.num_warps):
        assert value >= 1
        assert value & (value - 1) == 0
    assert config.num_warps * target.warp_size <= 1024
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))
    # Gate, up and the result in fp32 take at most half of a thread's 255 registers.
    assert 3 * tile <= 128 * config.num_warps * target.warp_size


# 2^38 elements of two bytes are 512 GiB.
@given(n_elements=st.integers(1, 2**38), layout=st.sampled_from(LAYOUTS), target=targets)
def test_forward_programs_are_what_the_hardware_takes(n_elements: int, layout: str, target: object) -> None:
    config = forward_config(n_elements, layout, target)
    assert_the_hardware_takes_it(config.block, config, target)
    assert -(-n_elements // config.block) < 2**31


@given(n_rows=row_counts, width=joined_widths, has_bias=st.booleans(), target=targets)
def test_backward_programs_cover_the_rows_and_no_more(n_rows: int, width: int, has_bias: bool, target: object) -> None:
    config = backward_config(n_rows, width, has_bias, target)
    assert_the_hardware_takes_it(config.block_m * config.block_n, config, target)
    assert config.block_m & (config.block_m - 1) == 0
    assert config.stages >= 1
    n_steps = -(-n_rows // config.block_m)
    # Programs go down the rows as far as there are any, and none has nothing to do.
    assert 1 <= config.n_row_programs <= n_steps
    if not has_bias:
        assert config.n_row_programs == n_steps
    # Tiles do not reach far beside a small matrix.
    assert config.block_n < 2 * width
    assert config.block_m < 2 * n_rows


@given(n_rows=row_counts, width=widths, target=targets)
def test_partial_sums_of_bias_gradients_are_few(n_rows: int, width: int, target: object) -> None:
    config = backward_config(n_rows, width, True, target)
    n_programs = -(-width // config.block_n) * config.n_row_programs
    # Programs enough to fill the GPU a few times over, whatever the number of rows.
    assert config.n_row_programs == 1 or n_programs <= 16 * target.compute_units


@given(n_rows=row_counts, width=widths, has_bias=st.booleans(), target=targets)
def test_backward_grids_are_within_limits_for_all_that_memory_holds(
    n_rows: int, width: int, has_bias: bool, target: object
) -> None:
    n_rows = max(1, min(n_rows, 2**38 // width))
    config = backward_config(n_rows, width, has_bias, target)
    assert -(-width // config.block_n) * config.n_row_programs < 2**31
    joined = backward_config(1, n_rows * width, False, target)
    assert -(-n_rows * width // joined.block_n) < 2**31


@pytest.mark.parametrize("name", list(COMPILE_TARGETS))
def test_one_token_is_spread_over_several_programs(name: str) -> None:
    for layout in LAYOUTS:
        assert 11_008 / forward_config(11_008, layout, COMPILE_TARGETS[name]).block > 8

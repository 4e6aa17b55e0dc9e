"""Launch choices: pure functions, no GPU."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tk_kernel_core.layout import RowLayout
from tk_kernel_core.targets import COMPILE_TARGETS
from tk_rmsnorm._launch import backward_config, forward_config, next_power_of_two, row_strides

targets = st.sampled_from(list(COMPILE_TARGETS.values()))


@given(hidden_size=st.integers(1, 2**21), has_residual=st.booleans(), target=targets)
def test_forward_tiles_are_what_the_hardware_takes(hidden_size: int, has_residual: bool, target: object) -> None:
    config = forward_config(hidden_size, has_residual, target)
    for value in (config.block_m, config.block_n, config.num_warps):
        assert value & (value - 1) == 0
    assert 1 <= config.num_warps * target.warp_size <= 1024
    # Two passes need the tile in registers once more, one pass needs all of the row in one tile.
    assert config.block_n >= hidden_size or config.block_m == 1
    assert config.dependent_launch == (target.name in ("sm_90", "sm_100"))


@given(n_rows=st.integers(1, 2**40), hidden_size=st.integers(1, 2**21), target=targets)
def test_backward_programs_cover_the_rows_and_no_more(n_rows: int, hidden_size: int, target: object) -> None:
    config = backward_config(n_rows, hidden_size, target)
    assert 1 <= config.n_programs <= 2 * target.compute_units
    assert config.n_programs <= -(-n_rows // config.block_m)
    assert config.block_n >= hidden_size or config.block_m == 1


@pytest.mark.parametrize(
    ("hidden_size", "has_residual", "want"),
    [
        (128, False, (16, 128, 4)),
        (4096, False, (1, 4096, 8)),
        (8192, False, (1, 8192, 8)),
        (16_384, False, (1, 8192, 16)),
        (16_384, True, (1, 16_384, 16)),
    ],
)
def test_tuned_choices_on_an_h200(hidden_size: int, has_residual: bool, want: tuple[int, int, int]) -> None:
    config = forward_config(hidden_size, has_residual, COMPILE_TARGETS["sm_90"])
    assert (config.block_m, config.block_n, config.num_warps) == want


@given(n=st.integers(1, 2**40))
def test_next_power_of_two(n: int) -> None:
    power = next_power_of_two(n)
    assert power // 2 < n <= power
    assert power & (power - 1) == 0


@given(hidden_size=st.integers(1, 2**20), strides=st.lists(st.integers(0, 2**40), min_size=2, max_size=2))
def test_strides_are_counted_in_a_unit_that_divides_them(hidden_size: int, strides: list[int]) -> None:
    unit, counted = row_strides(hidden_size, RowLayout(4, 2, (tuple(strides),)))
    assert [unit * count for count in counted] == strides
    assert hidden_size % unit == 0
    doubled = (hidden_size, *strides)
    assert unit == 16 or any(value % (2 * unit) for value in doubled)

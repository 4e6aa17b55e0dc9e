"""assert_close accepts what the tolerance allows and nothing else."""

from __future__ import annotations

import pytest
import torch

from tk_kernel_core.spec import Tolerance
from tk_testkit import assert_close

TIGHT = Tolerance(absolute=0.0, relative=1e-3)
NAN, INF = float("nan"), float("inf")


def test_accepts_differences_up_to_the_bound() -> None:
    want = torch.tensor([1.0, -100.0, 0.0], dtype=torch.float64)
    assert_close(want * (1 + 0.9e-3), want, TIGHT)
    with pytest.raises(AssertionError, match="2 of 3 elements"):
        assert_close(want * (1 + 1.1e-3), want, TIGHT)


def test_absolute_part_covers_zeros() -> None:
    want = torch.zeros(4)
    assert_close(want + 1e-6, want, Tolerance(absolute=1e-5, relative=0.0))
    with pytest.raises(AssertionError, match="4 of 4"):
        assert_close(want + 1e-6, want, TIGHT)


def test_message_names_the_worst_element() -> None:
    want = torch.ones(2, 3)
    got = want.clone()
    got[0, 1] = 1.5
    got[1, 2] = -7.0
    with pytest.raises(AssertionError, match=r"^y: 2 of 6 .* worst at \(1, 2\): got -7, want 1, difference 8"):
        assert_close(got, want, TIGHT, "y")


@pytest.mark.parametrize(
    ("got", "want"), [(NAN, 1.0), (1.0, NAN), (INF, 1.0), (1.0, INF), (-INF, INF), (INF, NAN), (NAN, INF)]
)
def test_refuses_misplaced_nan_and_infinity(got: float, want: float) -> None:
    with pytest.raises(AssertionError, match=r"1 of 2 .* worst at \(1,\)"):
        assert_close(torch.tensor([0.0, got]), torch.tensor([0.0, want]), Tolerance(absolute=1e9, relative=1.0))


def test_accepts_nan_and_infinity_in_place() -> None:
    values = torch.tensor([NAN, INF, -INF, 1.0])
    assert_close(values, values.clone(), TIGHT)


def test_refuses_other_dtype_shape_device_and_type() -> None:
    want = torch.ones(2, 2)
    with pytest.raises(AssertionError, match=r"want dtype torch.float32, got torch.bfloat16"):
        assert_close(want.bfloat16(), want, TIGHT)
    with pytest.raises(AssertionError, match=r"want shape \(2, 2\), got \(4,\)"):
        assert_close(want.reshape(4), want, TIGHT)
    with pytest.raises(AssertionError, match="want device cpu, got meta"):
        assert_close(want.to("meta"), want, TIGHT)
    with pytest.raises(AssertionError, match="must be a tensor, is float"):
        assert_close(1.0, want, TIGHT)


def test_float64_is_a_ground_truth_for_floating_dtypes_only() -> None:
    truth = torch.full((3,), 0.1, dtype=torch.float64)
    assert_close(truth.bfloat16(), truth, Tolerance(absolute=0.0, relative=2**-8))
    with pytest.raises(AssertionError, match="3 of 3"):
        assert_close(truth.bfloat16(), truth, Tolerance(absolute=0.0, relative=2**-14))
    with pytest.raises(AssertionError, match="want dtype"):
        assert_close(torch.ones(3, dtype=torch.int32), truth, TIGHT)


def test_compares_tuples_one_by_one() -> None:
    one, two = torch.ones(2), torch.zeros(2)
    assert_close((one, two), [one, two], TIGHT)
    with pytest.raises(AssertionError, match=r"^out\[1\]: 2 of 2"):
        assert_close((one, one), (one, two), TIGHT, "out")
    with pytest.raises(AssertionError, match="want 2 results, got 1"):
        assert_close((one,), (one, two), TIGHT)
    with pytest.raises(AssertionError, match="want 2 results, got Tensor"):
        assert_close(one, (one, two), TIGHT)


def test_accepts_empty_tensors() -> None:
    assert_close(torch.empty(0, 4), torch.empty(0, 4), TIGHT)

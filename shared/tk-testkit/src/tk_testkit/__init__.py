"""What the tests of all tk packages share: comparison, input strategies and a pytest plugin."""

from tk_testkit.close import assert_close
from tk_testkit.strategies import (
    assert_guards_intact,
    dense_strides,
    floating_dtypes,
    guarded_view,
    shapes,
    strides_for,
)

__all__ = [
    "assert_close",
    "assert_guards_intact",
    "dense_strides",
    "floating_dtypes",
    "guarded_view",
    "shapes",
    "strides_for",
]

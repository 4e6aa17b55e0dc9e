"""The Triton interpreter: whether it is on, and making it compute what a GPU computes.

The interpreter of Triton 3.6 (and 3.9) keeps bfloat16 as 16-bit integers: it truncates where a GPU rounds
to the nearest value, and its `tl.dot` multiplies the integers. Its `tl.exp2`, `tl.sqrt` and `tl.rsqrt` know
subnormal fp32 numbers, which on NVIDIA GPUs are 0 to them. It also refuses inline assembly, so it cannot wait
for a preceding kernel, which in the interpreter has always ended. And it replaces the language's functions by its own
anew in every call that a kernel makes, which takes a third of its time. All this is corrected once, when the first
kernel is loaded under `TRITON_INTERPRET=1`. Operators applied to bfloat16 values themselves stay wrong: kernels
convert to fp32 first.
"""

from __future__ import annotations

import functools
import os
from types import SimpleNamespace
from typing import Any


def interpreting() -> bool:
    """Whether the environment asks Triton for its interpreter, by `TRITON_INTERPRET=1`."""
    return os.environ.get("TRITON_INTERPRET", "").lower() in {"1", "true", "yes", "on", "y"}


def numpy_is_too_new() -> bool:
    """Whether the installed Triton's interpreter fails with the installed NumPy."""
    import numpy
    import triton

    release = tuple(map(int, numpy.__version__.split(".")[:2]))
    return release >= (2, 4) and triton.__version__.startswith(("3.6.", "3.7."))


@functools.cache
def prepare_interpreter() -> None:
    """Correct the interpreter's arithmetic, make it pass over dependent-launch instructions, and speed it up.

    Raises:
        RuntimeError: The installed NumPy is too new for the interpreter of this Triton.
    """
    import numpy as np
    import triton
    import triton.language as tl
    from triton.runtime import interpreter
    from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

    if numpy_is_too_new():
        raise RuntimeError(
            f"the interpreter of Triton {triton.__version__} needs numpy below 2.4, got {np.__version__}: its loop "
            f"bounds fail on newer releases"
        )

    cast, dot = InterpreterBuilder.cast_impl, InterpreterBuilder.create_dot

    def round_to_bfloat16(values: Any) -> Any:
        bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
        # Nearest, ties to even: add half of the last kept place, less one when that place is even.
        rounded = (bits + (0x7FFF + ((bits >> 16) & 1)).astype(np.uint32)) >> 16
        return np.where(np.isnan(values), (bits >> 16) | 0x40, rounded).astype(np.uint16)

    def widen(handle: Any) -> Any:
        if handle.dtype.scalar == tl.bfloat16:
            return TensorHandle((handle.data.astype(np.uint32) << 16).view(np.float32), tl.float32)
        return handle

    def corrected_cast(self: Any, source: Any, dst_type: Any) -> Any:
        source = widen(source)
        if dst_type.scalar == tl.bfloat16 and source.dtype.scalar != tl.bfloat16:
            return TensorHandle(round_to_bfloat16(source.data.astype(np.float32)), tl.bfloat16)
        return cast(self, source, dst_type)

    def corrected_dot(self: Any, a: Any, b: Any, d: Any, *rest: Any) -> Any:
        return dot(self, widen(a), widen(b), d, *rest)

    InterpreterBuilder.cast_impl = corrected_cast
    InterpreterBuilder.create_dot = corrected_dot

    def without_subnormals(handle: Any) -> Any:
        if handle.dtype.scalar != tl.float32:
            return handle
        smallest = np.finfo(np.float32).smallest_normal
        return TensorHandle(np.where(np.abs(handle.data) < smallest, handle.data * 0, handle.data), tl.float32)

    def flushing(function: Any) -> Any:
        return lambda self, argument: without_subnormals(function(self, without_subnormals(argument)))

    for name in ("create_exp2", "create_sqrt", "create_rsqrt"):
        setattr(InterpreterBuilder, name, flushing(getattr(InterpreterBuilder, name)))

    for name in ("gdc_wait", "gdc_launch_dependents"):
        setattr(tl.extra.cuda, name, _do_nothing)

    patch_language = interpreter._patch_lang

    @functools.cache
    def patch_language_for_good(function: Any) -> Any:
        # Nothing is put back: in a process that interprets, nothing compiles.
        patch_language(function)
        return SimpleNamespace(restore=_do_nothing)

    interpreter._patch_lang = patch_language_for_good


def _do_nothing() -> None:
    pass

"""Device code of the core: the plain copy that memory-bound kernels are held against."""

import triton
import triton.language as tl


@triton.jit
def copy_kernel(out_a_ptr, out_b_ptr, a_ptr, b_ptr, n_elements, BLOCK: tl.constexpr):
    """Copy a to out_a and, where given, b of the same size to out_b."""
    offsets = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    mask = offsets < n_elements
    tl.store(out_a_ptr + offsets, tl.load(a_ptr + offsets, mask=mask), mask=mask)
    if b_ptr is not None:
        tl.store(out_b_ptr + offsets, tl.load(b_ptr + offsets, mask=mask), mask=mask)

"""Linear layers with 4-bit weights (GPTQ, AWQ, compressed-tensors, rounded here) for LLM inference, in Triton."""

from importlib.metadata import version as _version

from tk_w4a16._explain import explain
from tk_w4a16._modules import W4A16Linear, replace_linear
from tk_w4a16._ops import w4a16_gemm, w4a16_linear
from tk_w4a16._packing import PackedInt4Weight
from tk_w4a16._quantize import dequantize_int4, pack_int4, quantize_weight_int4_grouped, unpack_int4
from tk_w4a16._reference import w4a16_linear_torch, w4a16_reference

__version__ = _version("tk-w4a16")

__all__ = [
    "PackedInt4Weight",
    "W4A16Linear",
    "dequantize_int4",
    "explain",
    "pack_int4",
    "quantize_weight_int4_grouped",
    "replace_linear",
    "unpack_int4",
    "w4a16_gemm",
    "w4a16_linear",
    "w4a16_linear_torch",
    "w4a16_reference",
]

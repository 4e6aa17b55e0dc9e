"""Linear layers with int8 weights, weight-only and W8A8, for LLM inference, in one Triton source."""

from importlib.metadata import version as _version

from tk_int8_gemm._explain import explain
from tk_int8_gemm._modules import Int8Linear, QuantizedLinear, replace_linear
from tk_int8_gemm._ops import int8_gemm, int8_linear, quantize_per_token, w8a8_gemm
from tk_int8_gemm._packing import PackedInt8Weight
from tk_int8_gemm._quantize import (
    QuantScheme,
    calculate_quantization_error,
    dequantize,
    quantize,
    quantize_asymmetric,
    quantize_symmetric,
    quantize_weight_per_channel,
    quantize_weight_per_channel_asymmetric,
)
from tk_int8_gemm._reference import int8_gemm_torch, quantize_per_token_torch, w8a8_gemm_torch

__version__ = _version("tk-int8-gemm")

__all__ = [
    "Int8Linear",
    "PackedInt8Weight",
    "QuantScheme",
    "QuantizedLinear",
    "calculate_quantization_error",
    "dequantize",
    "explain",
    "int8_gemm",
    "int8_gemm_torch",
    "int8_linear",
    "quantize",
    "quantize_asymmetric",
    "quantize_per_token",
    "quantize_per_token_torch",
    "quantize_symmetric",
    "quantize_weight_per_channel",
    "quantize_weight_per_channel_asymmetric",
    "replace_linear",
    "w8a8_gemm",
    "w8a8_gemm_torch",
]

"""SwiGLU, the product inside gated MLPs, for LLM inference and training, in one Triton source."""

from importlib.metadata import version as _version

from tk_swiglu._modules import SwiGLU, SwiGLUMLP, replace_swiglu
from tk_swiglu._ops import (
    swiglu_fused,
    swiglu_packed,
    swiglu_packed_quant_int8,
    swiglu_quant_int8,
    swiglu_with_bias,
)
from tk_swiglu._reference import swiglu_packed_torch, swiglu_torch

__version__ = _version("tk-swiglu")

__all__ = [
    "SwiGLU",
    "SwiGLUMLP",
    "replace_swiglu",
    "swiglu_fused",
    "swiglu_packed",
    "swiglu_packed_quant_int8",
    "swiglu_packed_torch",
    "swiglu_quant_int8",
    "swiglu_torch",
    "swiglu_with_bias",
]

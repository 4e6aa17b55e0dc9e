"""RMSNorm and fused residual-add RMSNorm for LLM inference and training, in one Triton source."""

from importlib.metadata import version as _version

from tk_rmsnorm._modules import TritonRMSNorm, replace_rmsnorm
from tk_rmsnorm._ops import (
    fused_add_rmsnorm,
    fused_add_rmsnorm_,
    fused_add_rmsnorm_quant_int8,
    rmsnorm,
    rmsnorm_quant_int8,
    rmsnorm_residual_fused,
)
from tk_rmsnorm._reference import rmsnorm_residual_torch, rmsnorm_torch

__version__ = _version("tk-rmsnorm")

__all__ = [
    "TritonRMSNorm",
    "fused_add_rmsnorm",
    "fused_add_rmsnorm_",
    "fused_add_rmsnorm_quant_int8",
    "replace_rmsnorm",
    "rmsnorm",
    "rmsnorm_quant_int8",
    "rmsnorm_residual_fused",
    "rmsnorm_residual_torch",
    "rmsnorm_torch",
]

"""Mixture-of-experts layers for LLM inference, from the router to the combined output, in one Triton source."""

from importlib.metadata import version as _version

from tk_moe_dispatch._expert_ops import (
    expert_ffn_triton,
    fused_expert_ffn,
    fused_experts,
    fused_moe_forward,
    grouped_gemm,
)
from tk_moe_dispatch._modules import FusedMoE
from tk_moe_dispatch._ops import (
    compute_permutation_indices,
    moe_router,
    permute_tokens,
    route_topk,
    unpermute_tokens,
)
from tk_moe_dispatch._packed import PackedExperts
from tk_moe_dispatch._parallel import ExpertParallelMoE
from tk_moe_dispatch._reference import (
    MoEReference,
    Routing,
    compute_permutation_indices_torch,
    expert_ffn_torch,
    fused_expert_ffn_torch,
    fused_experts_torch,
    fused_moe_forward_torch,
    grouped_gemm_torch,
    moe_router_torch,
    permute_tokens_torch,
    route_topk_torch,
    unpermute_tokens_torch,
)
from tk_moe_dispatch._replace import replace_moe

__version__ = _version("tk-moe-dispatch")

__all__ = [
    "ExpertParallelMoE",
    "FusedMoE",
    "MoEReference",
    "PackedExperts",
    "Routing",
    "compute_permutation_indices",
    "compute_permutation_indices_torch",
    "expert_ffn_torch",
    "expert_ffn_triton",
    "fused_expert_ffn",
    "fused_expert_ffn_torch",
    "fused_experts",
    "fused_experts_torch",
    "fused_moe_forward",
    "fused_moe_forward_torch",
    "grouped_gemm",
    "grouped_gemm_torch",
    "moe_router",
    "moe_router_torch",
    "permute_tokens",
    "permute_tokens_torch",
    "replace_moe",
    "route_topk",
    "route_topk_torch",
    "unpermute_tokens",
    "unpermute_tokens_torch",
]

"""Launches of the products with experts' weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from tk_kernel_core.launch import Kernel, PreparedLaunch

if TYPE_CHECKING:
    import torch

    from tk_moe_dispatch._gemm_launch import GemmConfig, StreamConfig

_GEMM = Kernel("tk_moe_dispatch._gemm_kernels", "expert_gemm_kernel")
_STREAM_UP = Kernel("tk_moe_dispatch._stream_kernels", "stream_up_kernel")
_STREAM_DOWN = Kernel("tk_moe_dispatch._stream_kernels", "stream_down_kernel")

Activation = tuple[float, float, float]
"""alpha, beta and limit of SwiGLU; an infinite limit is none."""

PLAIN: Activation = (1.0, 0.0, float("inf"))

TURN = 64
"""Features of gate that come before as many of up where both are joined: a thread that has sums of one has those of the
other then, even of 64 rows, where four warps have 128 columns."""


def fit_descriptors(*tensors: torch.Tensor) -> bool:
    """Whether descriptors reach matrices: neighbours along rows, which begin at multiples of 16 bytes.

    That depends on addresses too, which may differ from call to call.
    """
    return all(
        tensor.stride(-1) == 1
        and tensor.data_ptr() % 16 == 0
        and all(
            stride > 0 and stride * tensor.element_size() % 16 == 0
            for size, stride in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True)
            if size > 1
        )
        # What else is multiplied is laid out anew, row by row.
        and tensor.shape[-1] * tensor.element_size() % 16 == 0
        for tensor in tensors
    )


def gemm_launch(
    config: GemmConfig,
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    gated: bool = False,
    gathers: bool = False,
    scatters: bool = False,
    top_k: int = 1,
    activation: Activation = PLAIN,
) -> PreparedLaunch:
    """Prepare a product of sorted rows and their experts' weights, in one dtype of 16 bits.

    The launch takes out, x, x again, tiles, slots, weight, up_weight, routing, bias and up_bias. What is not read may
    be any tensor: slots, unless it gathers or scatters, and up_weight, unless it is gated. Routing and biases that
    there are not are None, or left off at the end.

    Args:
        config: How to launch it.
        x: Tokens [T, K] with neighbouring elements in a row if it `gathers`; else sorted rows [n_rows, K], or
            [tiles, block_m, K] if those of an expert end where a tile does, contiguous.
        weight: [experts, N, K] with neighbouring elements along K; both have the same strides if `gated`. Of a
            `joined` config it is both in turns, [experts, N / TURN, 2, TURN, K], and up_weight is not read.
        bias: [experts, N] of any strides, both the same, or None.
        gated: Whether SwiGLU follows.
        gathers: Whether rows of x are tokens: `slots // top_k`.
        scatters: Whether rows of out are slots, and not sorted rows.
        top_k: Slots of a token.
        activation: Of SwiGLU.
    """
    n, k = weight.shape[-2:]
    if config.joined:
        n *= weight.shape[1]
    block_m = 2 ** (config.block_m.bit_length() - 1)
    rest_m = config.block_m - block_m
    blocks: dict[str, tuple[int, ...]] = {}
    if config.descriptors:
        block = (1, config.block_n, config.block_k)
        joined_block = (1, config.block_n // TURN, 2, TURN, config.block_k)
        blocks = {"weight": joined_block} if config.joined else {"weight": block, "up_weight": block}
        if not gathers:
            its_tile = (1,) * (x.dim() - 2)
            blocks["x"] = (*its_tile, block_m, config.block_k)
            if rest_m:
                blocks["x_rest"] = (*its_tile, rest_m, config.block_k)
    return PreparedLaunch(
        _GEMM,
        (config.n_programs, 1, 1),
        (x.stride(0), weight.stride(0), weight.stride(-2), *_strides(bias), top_k, *activation),
        {
            "N": n,
            "K": k,
            "GATHER": gathers,
            "PADDED": x.dim() == 3,
            "SCATTER": scatters,
            "GATED": gated,
            "TURN": TURN if config.joined else 0,
            "SWAPPED": config.swapped,
            "DESCRIPTORS": config.descriptors,
            "BLOCK_M": block_m,
            "REST_M": rest_m,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "GROUP_M": config.group_m,
            "STAGES": config.stages,
            "BY_NEED": config.by_need,
            "FLATTEN": config.flatten,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        x.device,
        blocks,
        **_options(config),
    )


def stream_up_launch(
    config: StreamConfig,
    x: torch.Tensor,
    top_k: int,
    n_all: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation = PLAIN,
) -> PreparedLaunch:
    """Prepare SwiGLU of every slot's products, in the order of slots.

    The launch takes out [T * top_k, N], x, ids, weight, up_weight, expert_map, bias and up_bias; those that there are
    not are None, or left off at the end.

    Args:
        config: How to launch it.
        x: Tokens [T, K] with neighbouring elements in a row.
        top_k: Slots of a token.
        n_all: Entries of expert_map.
        weight: [experts, N, K], as for `gemm_launch`.
        bias: [experts, N], as for `gemm_launch`.
        activation: Of SwiGLU.
    """
    scalars = (x.stride(0), *weight.stride()[:2], *_strides(bias), *activation)
    return _stream_launch(_STREAM_UP, config, x.shape[0] * top_k, top_k, n_all, weight, scalars)


def stream_down_launch(
    config: StreamConfig,
    n_tokens: int,
    top_k: int,
    n_all: int,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
) -> PreparedLaunch:
    """Prepare the sum over tokens' slots of what `stream_up_launch` makes, times a weight and the routing weights.

    It must follow that launch in the stream. It takes out [T, N], x [T * top_k, K], ids, routing, weight, expert_map,
    bias and shared, which is added; those that there are not are None, or left off at the end.

    Args:
        config: How to launch it.
        n_tokens: T.
        top_k: Slots of a token.
        n_all: Entries of expert_map.
        weight: [experts, N, K], as for `gemm_launch`.
        bias: [experts, N], as for `gemm_launch`.
    """
    scalars = (*weight.stride()[:2], *_strides(bias))
    return _stream_launch(_STREAM_DOWN, config, n_tokens, top_k, n_all, weight, scalars)


def _stream_launch(
    kernel: Kernel,
    config: StreamConfig,
    n_rows: int,
    top_k: int,
    n_all: int,
    weight: torch.Tensor,
    scalars: tuple[int | float, ...],
) -> PreparedLaunch:
    n_experts, n, k = weight.shape
    return PreparedLaunch(
        kernel,
        (n_rows * -(-n // config.block_n), 1, 1),
        scalars,
        {
            "N": n,
            "K": k,
            "TOP_K": top_k,
            "N_ALL": n_all,
            "N_EXPERTS": n_experts,
            "BLOCK_N": config.block_n,
            "BLOCK_K": config.block_k,
            "DEPENDENT_LAUNCH": config.dependent_launch,
        },
        weight.device,
        **_options(config),
    )


def _strides(bias: torch.Tensor | None) -> tuple[int, int]:
    return (0, 0) if bias is None else (bias.stride(0), bias.stride(1))


def _options(config: GemmConfig | StreamConfig) -> dict[str, Any]:
    return {"num_warps": config.num_warps, **({"launch_pdl": True} if config.dependent_launch else {})}

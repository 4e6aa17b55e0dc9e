"""Experts spread over processes: tokens travel to them and back through torch.distributed."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.distributed as dist

from tk_kernel_core.checks import check_same_device, check_tensor
from tk_moe_dispatch._checks import (
    EXPERT_DTYPES,
    check_count,
    check_router,
    check_rows,
)
from tk_moe_dispatch._expert_ops import fused_experts
from tk_moe_dispatch._ops import moe_router, permute_tokens, unpermute_tokens
from tk_moe_dispatch._packed import PackedExperts
from tk_moe_dispatch._packed_checks import check_experts
from tk_moe_dispatch._reference import GatedLayout, Gating


class ExpertParallelMoE(torch.nn.Module):
    """A mixture-of-experts layer whose experts are spread over the ranks of a process group; for inference.

    Rank 0 holds the first experts, rank 1 the next ones, and so on, any number each. A rank routes its own tokens and
    sends each of them once to every rank that holds one of its experts. There `fused_experts` adds up what the experts
    of that rank contribute, and the sums return to be added, in fp32 and in the order of ranks.

    The result is that of one rank with all experts, up to one rounding to the dtype of `x` per rank that a token goes
    to. It is the same bit for bit for tokens whose experts are all on one rank, where the sums over experts are the
    same, if the products are too: these depend, as those of `fused_experts`, on the number of tokens at a time. For
    the same tokens on the same ranks it is always the same.

    Every rank calls the constructor and `forward` equally often, with any number of tokens, zero included. Errors of
    the constructor are raised on all ranks that passed a group. An error in `forward` is raised where it occurs, and
    other ranks wait for that one until the group's timeout.

    By default only rows that are needed travel, and how many that are comes to the host once per forward: it waits for
    the GPU. With `max_tokens` every token travels to every rank, in blocks of that many rows, and no host waits: with
    NCCL such a forward can be captured in a CUDA graph, and it suits the few tokens of decoding. One rank exchanges
    nothing and never waits.

    Experts that all tokens go to are not spread: what they return is to be added to what `forward` returns.

    Args:
        router_weight: [E, H] for all experts, floating point, the same on every rank.
        w13: [experts of this rank, 2 * F, H], float16 or bfloat16, as for `fused_experts`; the first size may be 0.
            Or `PackedExperts`, at least one on each rank.
        w2: [experts of this rank, H, F], likewise.
        top_k: Experts per token.
        gating: As for `moe_router`.
        router_bias: As for `moe_router`.
        group: The ranks; None for all. Its backend has to take tensors where the weights are: NCCL those on GPUs,
            gloo those on CPUs.
        max_tokens: The largest number of tokens that any rank will pass, and a bound on it; None for no bound.
        renormalize: As for `moe_router`.
        correction_bias: As for `moe_router`.
        n_groups: As for `moe_router`.
        topk_groups: As for `moe_router`.
        routed_scaling_factor: As for `moe_router`.
        w13_bias: [experts of this rank, 2 * F], floating point, or None.
        w2_bias: [experts of this rank, H], floating point, or None.
        layout: As for `fused_experts`.
        alpha: As for `fused_experts`.
        beta: As for `fused_experts`.
        limit: As for `fused_experts`.

    Attributes:
        router_weight: Parameter that shares its memory with the argument, as do `router_bias`, `correction_bias`,
            `w13`, `w2`, `w13_bias` and `w2_bias`; none has a gradient. `PackedExperts` stay modules.
        expert_map: Buffer int32 [E], the row of `w13` for each expert, -1 for those of other ranks.
        rank_of_expert: Buffer int64 [E], who holds each expert.

    Raises:
        TypeError: An argument is of another type, or has an unsupported dtype.
        ValueError: torch.distributed is not initialised, this process is not in the group, shapes, devices or settings
            do not fit, they differ between ranks, or the ranks do not hold E experts in all.
    """

    expert_map: torch.Tensor
    rank_of_expert: torch.Tensor
    router_weight: torch.nn.Parameter
    w13: torch.nn.Parameter | PackedExperts
    w2: torch.nn.Parameter | PackedExperts

    def __init__(
        self,
        router_weight: torch.Tensor,
        w13: torch.Tensor | PackedExperts,
        w2: torch.Tensor | PackedExperts,
        top_k: int,
        gating: Gating = "softmax",
        router_bias: torch.Tensor | None = None,
        *,
        group: dist.ProcessGroup | None = None,
        max_tokens: int | None = None,
        renormalize: bool = False,
        correction_bias: torch.Tensor | None = None,
        n_groups: int | None = None,
        topk_groups: int | None = None,
        routed_scaling_factor: float = 1.0,
        w13_bias: torch.Tensor | None = None,
        w2_bias: torch.Tensor | None = None,
        layout: GatedLayout = "concat",
        alpha: float = 1.0,
        beta: float = 0.0,
        limit: float | None = None,
    ) -> None:
        super().__init__()
        self.group = _checked_group(group)
        self.rank, self.world_size = dist.get_rank(self.group), dist.get_world_size(self.group)
        self.top_k, self.max_tokens = top_k, max_tokens
        self.routing: dict[str, Any] = {
            "gating": gating,
            "renormalize": renormalize,
            "n_groups": n_groups,
            "topk_groups": topk_groups,
            "routed_scaling_factor": routed_scaling_factor,
        }
        self.activation: dict[str, Any] = {"layout": layout, "alpha": alpha, "beta": beta, "limit": limit}
        tensors = {
            "router_weight": router_weight,
            "router_bias": router_bias,
            "correction_bias": correction_bias,
            "w13": w13,
            "w2": w2,
            "w13_bias": w13_bias,
            "w2_bias": w2_bias,
        }
        n_experts_of_ranks = self._agree(tensors)
        for name, tensor in tensors.items():
            if isinstance(tensor, PackedExperts):
                self.add_module(name, tensor)
                continue
            parameter = None if tensor is None else torch.nn.Parameter(tensor, requires_grad=False)
            self.register_parameter(name, parameter)
        counts = torch.tensor(n_experts_of_ranks)
        rank_of_expert = torch.arange(self.world_size).repeat_interleave(counts)
        expert_map = torch.full_like(rank_of_expert, -1, dtype=torch.int32)
        expert_map[rank_of_expert == self.rank] = torch.arange(w13.shape[0], dtype=torch.int32)
        # They follow from the group, which a state dict knows nothing of.
        self.register_buffer("rank_of_expert", rank_of_expert.to(w13.device), persistent=False)
        self.register_buffer("expert_map", expert_map.to(w13.device), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Route tokens and apply their experts, wherever these are.

        Args:
            x: [..., H] in the dtype of `w13`, any strides; the tokens of this rank.

        Returns:
            A new contiguous tensor with the shape and dtype of `x`.

        Raises:
            TypeError: `x` is no tensor, or of another dtype.
            ValueError: `x` has another hidden size or device, or more than `max_tokens` tokens.
            NotImplementedError: A gradient is wanted.
        """
        width = self.router_weight.shape[1]
        check_rows("x", x, width, EXPERT_DTYPES if isinstance(self.w13, PackedExperts) else (self.w13.dtype,))
        check_same_device("x", x, self.w13.device, "w13")
        rows = x.reshape(math.prod(x.shape[:-1]), width)
        n_tokens = rows.shape[0]
        if self.max_tokens is not None and n_tokens > self.max_tokens:
            raise ValueError(f"x must have at most max_tokens = {self.max_tokens} tokens, got {n_tokens}")
        biases: dict[str, Any] = {"router_bias": self.router_bias, "correction_bias": self.correction_bias}
        ids, weights, _ = moe_router(rows, self.router_weight, self.top_k, **self.routing, **biases)
        if self.world_size == 1:
            return self._apply_experts(rows, weights, ids).view(x.shape)
        if self.max_tokens is None:
            targets = self._ranks_of(ids)
        else:
            n_absent = self.max_tokens - n_tokens
            rows, weights = (torch.nn.functional.pad(part, (0, 0, 0, n_absent)) for part in (rows, weights))
            ids = torch.nn.functional.pad(ids, (0, 0, 0, n_absent), value=-1)
            targets = torch.arange(self.world_size, device=x.device).repeat(self.max_tokens, 1)
        # What experts are to a token elsewhere, ranks are here.
        to_send, offsets, pairs, places = permute_tokens(rows, targets, self.world_size)
        routed = torch.cat([ids.int(), weights.view(torch.int32)], 1)[pairs // targets.shape[1]]
        if self.max_tokens is None:
            counts = offsets.diff()
            n_sent, n_received = torch.stack([counts, self._exchange(counts)]).tolist()
        else:
            n_sent = n_received = [self.max_tokens] * self.world_size
        received = self._exchange(to_send[: sum(n_sent)], n_sent, n_received)
        routed = self._exchange(routed[: sum(n_sent)], n_sent, n_received)
        ids, weights = (part.contiguous() for part in routed.chunk(2, 1))
        sums = self._apply_experts(received, weights.view(torch.float32), ids)
        returned = torch.empty_like(to_send)
        dist.all_to_all_single(returned[: sum(n_sent)], sums, n_sent, n_received, self.group)
        ones = torch.ones(targets.shape, device=x.device)
        return unpermute_tokens(returned, ones, places, *targets.shape)[:n_tokens].view(x.shape)

    def extra_repr(self) -> str:
        """Return sizes, and which part this rank has."""
        n_experts, width = self.router_weight.shape
        return (
            f"hidden_size={width}, num_experts={n_experts}, top_k={self.top_k}, max_tokens={self.max_tokens}, "
            f"rank={self.rank}, world_size={self.world_size}, local_experts={self.w13.shape[0]}"
        )

    def _agree(self, tensors: dict[str, Any]) -> list[int]:
        """Return how many experts each rank has; raise the same error on all ranks if one has a fault."""
        mine: Any
        try:
            mine = self._checked(**tensors)
        except (TypeError, ValueError) as error:
            mine = error
        ranks: list[Any] = [None] * self.world_size
        # Where the weights are on a GPU, NCCL takes the current device for what it gathers.
        weight = tensors["w13"]
        on_device = weight.codes if isinstance(weight, PackedExperts) else weight
        with torch.cuda.device_of(on_device if isinstance(on_device, torch.Tensor) else torch.empty(0)):
            dist.all_gather_object(ranks, mine, self.group)
        for rank, facts in enumerate(ranks):
            if isinstance(facts, Exception):
                raise type(facts)(f"{facts}, on rank {rank}")
        counts = [facts.pop("experts") for facts in ranks]
        for name in ranks[0]:
            values = [facts[name] for facts in ranks]
            if any(value != values[0] for value in values):
                raise ValueError(f"{name} must be the same on all ranks, got {', '.join(map(str, values))}")
        n_experts = tensors["router_weight"].shape[0]
        if sum(counts) != n_experts:
            raise ValueError(f"w13 must hold the {n_experts} experts of router_weight over all ranks, got {counts}")
        return counts

    def _checked(
        self,
        router_weight: Any,
        router_bias: Any,
        correction_bias: Any,
        w13: Any,
        w2: Any,
        w13_bias: Any,
        w2_bias: Any,
    ) -> dict[str, Any]:
        """Raise TypeError or ValueError for what this rank cannot work with, else return what ranks have to share."""
        is_packed = isinstance(w13, PackedExperts)
        if not is_packed:
            check_tensor("w13", w13, EXPERT_DTYPES)
        devices = [part.partition(":")[0] for part in dist.get_backend_config(self.group).split(",")]
        if w13.device.type not in devices:
            raise ValueError(f"w13 must be on {' or '.join(devices)}, where group exchanges tensors, got {w13.device}")
        if self.max_tokens is not None:
            check_count("max_tokens", self.max_tokens, 1)
        check_tensor("router_weight", router_weight)
        # Tokens such as forward will see, but none of them.
        dtype = torch.float16 if is_packed else w13.dtype
        x = torch.empty(0, router_weight.shape[-1] if router_weight.dim() else 0, dtype=dtype, device=w13.device)
        settings = self.top_k, *self.routing.values()
        check_router(x, router_weight, router_bias, correction_bias, *settings)
        weights = torch.empty(0, self.top_k, device=w13.device)
        routed = weights, weights.int(), None, w13_bias, w2_bias, None, None
        check_experts(x, w13, w2, *routed, *self.activation.values(), None)
        return {
            "experts": w13.shape[0],
            "the shape of router_weight": tuple(router_weight.shape),
            "the dtype of w13": f"packed in {w13.bits} bits" if is_packed else str(w13.dtype),
            "top_k": self.top_k,
            "max_tokens": self.max_tokens,
            **self.routing,
            **self.activation,
        }

    def _ranks_of(self, ids: torch.Tensor) -> torch.Tensor:
        """Return the different ranks that tokens go to, in order, and then the world size, which is no rank."""
        ranks = self.rank_of_expert[ids].sort(1).values
        is_repeated = torch.nn.functional.pad(ranks[:, 1:] == ranks[:, :-1], (1, 0))
        ranks = ranks.masked_fill(is_repeated, self.world_size).sort(1).values
        return ranks[:, : self.world_size].contiguous()

    def _exchange(
        self, rows: torch.Tensor, n_sent: list[int] | None = None, n_received: list[int] | None = None
    ) -> torch.Tensor:
        """Send neighbouring rows to rank after rank, and return those that came, rank after rank."""
        n_rows = rows.shape[0] if n_received is None else sum(n_received)
        received = rows.new_empty(n_rows, *rows.shape[1:])
        dist.all_to_all_single(received, rows, n_received, n_sent, self.group)
        return received

    def _apply_experts(self, rows: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
        if self.w13.shape[0] == 0:
            return torch.zeros_like(rows)
        options: dict[str, Any] = {"expert_map": self.expert_map, "w13_bias": self.w13_bias, "w2_bias": self.w2_bias}
        return fused_experts(rows, self.w13, self.w2, weights, ids, **options, **self.activation)


def _checked_group(group: Any) -> dist.ProcessGroup:
    """Return a group that this process belongs to: the given one, or for None that of all processes."""
    if not (dist.is_available() and dist.is_initialized()):
        raise ValueError("group must be of torch.distributed, which is not initialised (init_process_group)")
    group = dist.group.WORLD if group is None else group
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("group must be one that this process belongs to, got one of others (NON_GROUP_MEMBER)")
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(f"group must be a torch.distributed.ProcessGroup, got {type(group).__name__}")
    return group

"""Experts spread over processes, which this file is also the program of: gloo on CPUs, NCCL on GPUs."""

from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from tk_moe_dispatch import ExpertParallelMoE, PackedExperts, fused_experts_torch, moe_router_torch

# Of no kernel: run beside what compiles, in a process that the interpreter does not slow down.
pytestmark = pytest.mark.compiler

Tensor = torch.Tensor
Results = list[dict[str, Any]]

N_EXPERTS, WIDTH, FFN, TOP_K = 7, 16, 8, 3
N_TOKENS = (6, 0, 9, 2)
# Experts of each rank, by the ranks of the group; none is a fair share.
SPREADS = {(0,): (7,), (0, 1): (4, 3), (1, 2, 3): (1, 5, 1), (0, 1, 2, 3): (3, 0, 2, 2)}
GPT_OSS = {"alpha": 1.702, "beta": 1.0, "limit": 1.5, "layout": "interleaved"}
# Experts are integer polynomials times a half, and the scores of the best ones are 1.
EXACT = {"alpha": 0.0, "gating": "sigmoid"}


class Layer:
    """Experts and the tokens of all ranks, the same in every process."""

    def __init__(self, device: str = "cpu", *, whole: bool = False) -> None:
        generator = torch.Generator().manual_seed(0)

        def random(*shape: int, scale: float = 1.0) -> Tensor:
            integers = torch.randint(-1, 2, shape, generator=generator)
            normal = torch.randn(shape, generator=generator) * scale
            return (integers if whole else normal).half().to(device)

        self.router = random(N_EXPERTS, WIDTH) * (64 if whole else 1)
        self.w13 = random(N_EXPERTS, 2 * FFN, WIDTH, scale=0.25)
        self.w2 = random(N_EXPERTS, WIDTH, FFN, scale=0.35)
        self.biases = {"w13_bias": random(N_EXPERTS, 2 * FFN), "w2_bias": random(N_EXPERTS, WIDTH)}
        self.tokens = [random(n, WIDTH) for n in N_TOKENS]

    def on(self, ranks: tuple[int, ...], rank: int, group: Any, top_k: int = TOP_K, **options: Any) -> Any:
        """Make the module of a rank."""
        place = ranks.index(rank)
        first = sum(SPREADS[ranks][:place])
        mine = slice(first, first + SPREADS[ranks][place])
        options |= {name: bias[mine] for name, bias in self.biases.items()}
        return ExpertParallelMoE(self.router, self.w13[mine], self.w2[mine], top_k, group=group, **options)


def spread(device: str, rank: int, groups: dict[tuple[int, ...], Any]) -> dict[Any, Tensor]:
    """Results by the ranks and by how rows are exchanged."""
    layer, results = Layer(device), {}
    x = layer.tokens[rank]
    for ranks, group in groups.items():
        if rank in ranks:
            for max_tokens in (None, max(N_TOKENS)):
                moe = layer.on(ranks, rank, group, max_tokens=max_tokens, renormalize=True, **GPT_OSS)
                results[ranks, max_tokens] = moe(x)
                # Again, with other leading dimensions and strides.
                apart = torch.stack([x, x], -1)[..., 0].unsqueeze(0)
                assert torch.equal(moe(apart), results[ranks, max_tokens].unsqueeze(0))
                assert moe(x[:0]).shape == (0, WIDTH)
    return results


def one_choice(device: str, rank: int, groups: dict[tuple[int, ...], Any]) -> dict[Any, Tensor]:
    """Results by ranks for one expert per token, whose weight is 1."""
    layer = Layer(device)
    return {
        ranks: layer.on(ranks, rank, group, top_k=1, renormalize=True)(layer.tokens[rank])
        for ranks, group in groups.items()
        if rank in ranks
    }


def exact(device: str, rank: int, groups: dict[tuple[int, ...], Any]) -> dict[Any, Tensor]:
    """Results by ranks for numbers without rounding."""
    layer = Layer(device, whole=True)
    return {
        ranks: layer.on(ranks, rank, group, **EXACT)(layer.tokens[rank])
        for ranks, group in groups.items()
        if rank in ranks
    }


def packed(device: str, rank: int, groups: dict[tuple[int, ...], Any]) -> dict[Any, Tensor]:
    """Results by ranks for weights of 4 and 8 bits."""
    layer, results = Layer(device), {}
    for ranks, group in groups.items():
        if rank in ranks and 0 not in SPREADS[ranks]:
            first = sum(SPREADS[ranks][: ranks.index(rank)])
            mine = slice(first, first + SPREADS[ranks][ranks.index(rank)])
            w13 = PackedExperts.quantize_int4(layer.w13[mine], -1, layout="concat")
            w2 = PackedExperts.quantize_int8(layer.w2[mine])
            moe = ExpertParallelMoE(layer.router, w13, w2, TOP_K, group=group, renormalize=True)
            results[ranks] = moe(layer.tokens[rank])
    return results


def faults(device: str, rank: int, groups: dict[tuple[int, ...], Any]) -> dict[str, str]:
    """What is raised, by fault."""
    layer, pair = Layer(device), groups[0, 1]
    router, w13, w2 = layer.router, layer.w13[:4], layer.w2[:4]
    narrow, is_second = router[:, :8], rank == 1
    moe = layer.on((0, 1), rank, pair, max_tokens=2) if rank < 2 else None
    wrong: dict[str, Callable[[], Any]] = {
        "experts": lambda: ExpertParallelMoE(router, w13, w2, 2, group=pair),
        "width": lambda: (
            ExpertParallelMoE(router, w13, w2, 2, group=pair)
            if is_second
            else ExpertParallelMoE(narrow, w13[..., :8], w2[:, :8], 2, group=pair)
        ),
        "settings": lambda: ExpertParallelMoE(router, w13, w2, 2 + rank, group=pair),
        "one rank": lambda: ExpertParallelMoE(router, w13.float() if is_second else w13, w2, 2, group=pair),
        "packed": lambda: ExpertParallelMoE(router, PackedExperts.quantize_int8(w13), w2, 2, group=pair),
        "shape": lambda: ExpertParallelMoE(router, w13, w2[:, :5], 2, group=pair),
        "device": lambda: ExpertParallelMoE(router.to("meta"), w13.to("meta"), w2.to("meta"), 2, group=pair),
        "bound": lambda: ExpertParallelMoE(router, w13, w2, 2, group=pair, max_tokens=0),
        "group": lambda: ExpertParallelMoE(router, w13, w2, 2, group="all"),  # type: ignore[arg-type]
        "tokens": lambda: moe(torch.cat([w13[0], w13[0]])[:3]),
        "dtype": lambda: moe(router.float()),
        "hidden": lambda: moe(narrow),
        "gradient": lambda: moe(w13[0, :2].clone().requires_grad_()),
    }
    raised = {}
    for fault, call in wrong.items() if rank < 2 else [("member", wrong["experts"])]:
        try:
            call()
        except (TypeError, ValueError, NotImplementedError) as error:
            raised[fault] = f"{type(error).__name__}: {error}"
    return raised


def captured(device: str, rank: int, groups: dict[tuple[int, ...], Any]) -> list[tuple[Tensor, Tensor]]:
    """What a graph makes of new tokens, and what a call makes of them."""
    layer, x = Layer(device), torch.zeros(4, WIDTH, dtype=torch.half, device=device)
    moe = layer.on((0, 1), rank, groups[0, 1], max_tokens=4)
    moe(x)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = moe(x)
    pairs = []
    for tokens in (layer.tokens[0][:4], layer.tokens[2][4:8], layer.tokens[2][:1].expand(4, -1)):
        x.copy_(tokens * (rank + 1))
        graph.replay()
        pairs.append((y.clone(), moe(x)))
    return pairs


def work(rank: int, world_size: int, device: str, folder: Path) -> None:
    """Be one rank: carry out all cases and save what they return, or their error."""
    torch.set_num_threads(1)
    if device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(
        "nccl" if device == "cuda" else "gloo",
        store=dist.FileStore(str(folder / "store"), world_size),
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=20),
    )
    groups = {ranks: dist.new_group(list(ranks)) for ranks in SPREADS if len(ranks) <= world_size}
    results: dict[str, Any] = {}
    for case in (spread, packed, captured) if device == "cuda" else (spread, packed, one_choice, exact, faults):
        try:
            results[case.__name__] = case(device, rank, groups)
        except Exception:  # noqa: BLE001  # whatever it is, the test shows it
            results[case.__name__] = traceback.format_exc()
    torch.save(results, folder / f"{rank}.pt")
    dist.destroy_process_group()


def run(world_size: int, device: str, folder: Path) -> Results:
    """Run this file as a program, and return what its ranks saved."""
    # Without the interpreter, the reference serves tensors on the CPU; their processes meet on the loopback interface.
    environment = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
    environment["GLOO_SOCKET_IFNAME"] = "lo"
    command = [sys.executable, __file__, str(world_size), device, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=90, check=False)
    assert done.returncode == 0, done.stderr
    return [torch.load(folder / f"{rank}.pt", map_location="cpu") for rank in range(world_size)]


def check_close(got: Tensor, ranks: tuple[int, ...]) -> None:
    """Compare with all experts at once in float64, up to the roundings of parts and of their sum."""
    layer = Layer()
    x = torch.cat([layer.tokens[rank] for rank in ranks])
    ids, weights, _ = moe_router_torch(x.double(), layer.router.double(), TOP_K, renormalize=True)
    tensors = x.double(), layer.w13.double(), layer.w2.double()
    biases = {name: bias.double() for name, bias in layer.biases.items()}
    want = fused_experts_torch(*tensors, weights, ids, **biases, **GPT_OSS)
    # Roundings do not cancel where their terms do: those of absolute values.
    positive = {name: bias.abs() for name, bias in biases.items()} | {"alpha": 1.702, "beta": 1.0}
    terms = fused_experts_torch(*(tensor.abs() for tensor in tensors), weights, ids, **positive, layout="interleaved")
    assert got.shape == want.shape
    assert got.dtype == torch.half
    assert float(((got.double() - want).abs() - 2 * torch.finfo(torch.half).eps * terms).max()) <= 0.0


def gathered(results: Results, case: str, ranks: tuple[int, ...], *key: Any) -> Tensor:
    """Return the rows of all ranks."""
    for rank in ranks:
        assert isinstance(results[rank][case], dict), results[rank][case]
    return torch.cat([results[rank][case][(ranks, *key) if key else ranks] for rank in ranks])


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> Results:
    return run(4, "cpu", tmp_path_factory.mktemp("ranks"))


@pytest.mark.parametrize("ranks", SPREADS)
def test_any_number_of_ranks_makes_up_the_whole(ranks: tuple[int, ...], results: Results) -> None:
    got = gathered(results, "spread", ranks, None)
    check_close(got, ranks)
    # Padded blocks hold the same rows, in the same order.
    assert torch.equal(gathered(results, "spread", ranks, max(N_TOKENS)), got)


def check_packed(results: Results, ranks: tuple[int, ...]) -> None:
    layer = Layer()
    x = torch.cat([layer.tokens[rank] for rank in ranks]).double()
    ids, weights, _ = moe_router_torch(x, layer.router.double(), TOP_K, renormalize=True)
    w13, w2 = PackedExperts.quantize_int4(layer.w13, -1, layout="concat"), PackedExperts.quantize_int8(layer.w2)
    want = fused_experts_torch(x, w13.dequantize(torch.float64), w2.dequantize(torch.float64), weights, ids)
    got = gathered(results, "packed", ranks)
    # Roundings of parts and of their sum, whose terms are of size 8 at most.
    assert float((got.double() - want).abs().max()) <= 2 * torch.finfo(torch.half).eps * 8


@pytest.mark.parametrize("ranks", [ranks for ranks in SPREADS if 0 not in SPREADS[ranks]])
def test_packed_experts_are_spread_like_others(ranks: tuple[int, ...], results: Results) -> None:
    check_packed(results, ranks)


@pytest.mark.parametrize("ranks", SPREADS)
def test_tokens_with_experts_on_one_rank_have_the_bits_of_one_rank(ranks: tuple[int, ...], results: Results) -> None:
    layer = Layer()
    x = torch.cat([layer.tokens[rank] for rank in ranks])
    ids, weights, _ = moe_router_torch(x, layer.router, 1, renormalize=True)
    assert torch.equal(weights, torch.ones_like(weights))
    want = fused_experts_torch(x, layer.w13, layer.w2, weights, ids, **layer.biases)
    assert torch.equal(gathered(results, "one_choice", ranks), want)


@pytest.mark.parametrize("ranks", SPREADS)
def test_without_rounding_the_number_of_ranks_does_not_show(ranks: tuple[int, ...], results: Results) -> None:
    layer = Layer(whole=True)
    x = torch.cat([layer.tokens[rank] for rank in ranks])
    ids, weights, _ = moe_router_torch(x, layer.router, TOP_K, "sigmoid")
    want = fused_experts_torch(x, layer.w13, layer.w2, weights, ids, alpha=0.0, **layer.biases)
    assert want.abs().max() > 10.0
    assert torch.equal(gathered(results, "exact", ranks), want)


FAULTS = {
    "experts": "ValueError: w13 must hold the 7 experts of router_weight over all ranks, got [4, 4]",
    "width": "ValueError: the shape of router_weight must be the same on all ranks, got (7, 8), (7, 16)",
    "settings": "ValueError: top_k must be the same on all ranks, got 2, 3",
    "one rank": "TypeError: w13 must have dtype float16, bfloat16, got float32, on rank 1",
    "packed": "TypeError: w2 must be PackedExperts, like the other weight, got Tensor, on rank 0",
    "shape": "ValueError: w2 must have shape (4, 16, 8), got (4, 5, 8), on rank 0",
    "device": "ValueError: w13 must be on cpu or cuda, where group exchanges tensors, got meta, on rank 0",
    "bound": "ValueError: max_tokens must be at least 1, got 0, on rank 0",
    "group": "TypeError: group must be a torch.distributed.ProcessGroup, got str",
    "tokens": "ValueError: x must have at most max_tokens = 2 tokens, got 3",
    "dtype": "TypeError: x must have dtype float16, got float32",
    "hidden": "ValueError: x must have shape [..., 16], got (7, 8)",
    "gradient": "NotImplementedError: tk_moe_dispatch::moe_router has no derivative, "
    "and an argument requires a gradient",
}


def test_a_fault_of_one_rank_is_an_error_on_all(results: Results) -> None:
    member = "ValueError: group must be one that this process belongs to, got one of others (NON_GROUP_MEMBER)"
    assert [rank["faults"] for rank in results] == [FAULTS, FAULTS, {"member": member}, {"member": member}]


def test_processes_have_to_be_in_touch() -> None:
    layer = Layer()
    with pytest.raises(ValueError, match=r"group must be of torch\.distributed, which is not initialised"):
        ExpertParallelMoE(layer.router, layer.w13, layer.w2, TOP_K)


@pytest.mark.gpu
def test_experts_on_two_gpus(tmp_path: Path) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    results = run(2, "cuda", tmp_path)
    for max_tokens in (None, max(N_TOKENS)):
        check_close(gathered(results, "spread", (0, 1), max_tokens), (0, 1))
    check_packed(results, (0, 1))
    for rank in results:
        assert isinstance(rank["captured"], list), rank["captured"]
        for replayed, called in rank["captured"]:
            assert torch.equal(replayed, called)
            assert bool(called.any())


def main() -> None:
    """Start the ranks."""
    world_size, device, folder = int(sys.argv[1]), sys.argv[2], Path(sys.argv[3])
    # Processes that use CUDA cannot be forked off; others have torch imported that way.
    context: Any = multiprocessing.get_context("spawn" if device == "cuda" else "fork")
    ranks = [context.Process(target=work, args=(rank, world_size, device, folder)) for rank in range(world_size)]
    for process in ranks:
        process.start()
    deadline = time.monotonic() + 60
    for process in ranks:
        process.join(max(0.0, deadline - time.monotonic()))
    for process in ranks:
        process.kill()
        process.join()
    sys.exit(any(process.exitcode != 0 for process in ranks))


if __name__ == "__main__":
    main()

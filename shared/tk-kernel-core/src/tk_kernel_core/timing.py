"""Timing GPU work without measuring the cache, the launch queue or the clock's resolution.

A call is timed by replaying a CUDA graph that runs it once on each of many input sets. But for small calls,
the sets together are several times the caches, so no call finds its inputs there that a real one would not;
each result stays alive until its set comes round again, so outputs rotate too.
"""

from __future__ import annotations

import statistics
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict

from tk_kernel_core.spec import Inputs

ROTATED_BYTES = 2**30
"""The input sets together hold at least this much: four times the largest last-level cache there is, that of MI300X."""

MOST_INPUT_SETS = 64
"""Bound on the number of sets: the working set of a smaller call stays in L2, as it does in a decode step."""

_MINIMUM_SAMPLE_US = 1000.0
_HOST_BATCH_US = 10_000.0

Method = Literal["cuda-graph", "cuda-events", "cpu-clock"]


class Measurement(BaseModel):
    """Time of one call.

    Attributes:
        latency_us: Median over the samples, in microseconds.
        spread_us: Distance between the quartiles of the samples, in microseconds; 0 for one sample.
        samples_us: Every sample: the mean time of a call within it, in microseconds.
        calls_per_sample: Calls that each sample averages over.
        method: `cuda-graph` (graph replays between two events), `cuda-events` (eager calls between two
            events, which include gaps where the host is too slow) or `cpu-clock`.
        note: Why the graph could not be used, or empty.
        clock_mhz_before: Clock of the multiprocessors before the samples; None where it cannot be read.
        clock_mhz_after: The same after the samples.
        host_us: Host time of one eager call without waiting for the GPU, in microseconds; None on a CPU.
    """

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")

    latency_us: float
    spread_us: float
    samples_us: tuple[float, ...]
    calls_per_sample: int
    method: Method
    note: str = ""
    clock_mhz_before: float | None = None
    clock_mhz_after: float | None = None
    host_us: float | None = None


def summarise(samples_us: Sequence[float], calls_per_sample: int, method: Method, **rest: Any) -> Measurement:
    """Build a measurement from samples.

    Raises:
        ValueError: There is no sample.
    """
    if not samples_us:
        raise ValueError("samples_us must hold at least one sample, got none")
    quartiles = statistics.quantiles(samples_us, n=4) if len(samples_us) > 1 else (samples_us[0],) * 3
    return Measurement(
        latency_us=statistics.median(samples_us),
        spread_us=quartiles[2] - quartiles[0],
        samples_us=tuple(samples_us),
        calls_per_sample=calls_per_sample,
        method=method,
        **rest,
    )


def rotated_inputs(make: Callable[[int], Inputs], device: str) -> list[Inputs]:
    """Make input sets that together exceed a GPU's caches several times; a single set for a CPU.

    Args:
        make: Makes the inputs for a seed.
        device: Where they are made.
    """
    first = make(0)
    if device == "cpu":
        return [first]
    size = max(1, bytes_in(first))
    count = min(MOST_INPUT_SETS, max(2, -(-ROTATED_BYTES // size)))
    return [first, *(make(seed) for seed in range(1, count))]


def measure(function: Callable[[Inputs], Any], input_sets: Sequence[Inputs], *, budget_s: float = 0.5) -> Measurement:
    """Time one call of a function, on the device its inputs are on.

    Args:
        function: Called with one input set. What it raises reaches the caller.
        input_sets: At least one set; all of one shape.
        budget_s: About how long to sample, in seconds.

    Raises:
        ValueError: There is no input set.
    """
    if not input_sets:
        raise ValueError("input_sets must hold at least one set, got none")
    device = next((tensor.device for tensor in _tensors(input_sets[0]) if tensor.is_cuda), None)
    if device is None:
        return _measure_on_cpu(function, input_sets, budget_s)
    with torch.cuda.device(device):
        for inputs in input_sets:
            function(inputs)
        torch.cuda.synchronize()
        repeats = 1
        method: Method = "cuda-graph"
        note = ""
        try:
            run = capture(function, input_sets, repeats)
            first_us = _elapsed_us(run)
            repeats = _repeats_for(first_us)
            if repeats > 1:
                run = capture(function, input_sets, repeats)
        except Exception as error:  # noqa: BLE001 - whatever refuses the capture, the events still measure
            _recover_from_capture()
            method, note = "cuda-events", f"no CUDA graph: {type(error).__name__}: {error}".splitlines()[0]

            def run_eagerly() -> None:
                for _ in range(repeats):
                    for inputs in input_sets:
                        function(inputs)

            run = run_eagerly
            repeats = _repeats_for(_elapsed_us(run))
        calls = repeats * len(input_sets)
        before = _clock_mhz(device)
        samples = [elapsed / calls for elapsed in _sample(lambda: _elapsed_us(run), budget_s)]
        after = _clock_mhz(device)
        host_us = _host_us(function, input_sets[0], statistics.median(samples))
    return summarise(samples, calls, method, note=note, clock_mhz_before=before, clock_mhz_after=after, host_us=host_us)


def bytes_in(inputs: Inputs) -> int:
    """Bytes of memory under the tensors, once where several share it."""
    sizes: dict[int, tuple[int, int]] = {}
    for tensor in _tensors(inputs):
        memory = tensor.untyped_storage()
        # Not its address, which meta tensors lack.
        reached = sizes.get(memory._cdata, (0, 0))[0] + tensor.numel() * tensor.element_size()
        sizes[memory._cdata] = reached, memory.nbytes()
    return sum(min(size) for size in sizes.values())


def _tensors(value: object) -> Iterable[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for item in value.values():
            yield from _tensors(item)
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _tensors(item)


def capture(function: Callable[[Inputs], Any], input_sets: Sequence[Inputs], repeats: int = 1) -> Callable[[], None]:
    """Return what replays a CUDA graph of calls on each of the input sets in turn; it has been replayed once.

    Args:
        function: Called with one input set, and called before with each kind of them.
        input_sets: All on the current device. The graph keeps each one's result alive until its turn comes again.
        repeats: Turns within the graph.
    """
    results: list[Any] = [None] * len(input_sets)
    graph = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        function(input_sets[0])
    torch.cuda.current_stream().wait_stream(stream)
    with warnings.catch_warnings():
        # A capture that fails also ends empty, of which torch warns.
        warnings.filterwarnings("ignore", message="The CUDA Graph is empty")
        with torch.cuda.graph(graph, stream=stream):
            for _ in range(repeats):
                for index, inputs in enumerate(input_sets):
                    results[index] = function(inputs)
    graph.replay()
    torch.cuda.synchronize()
    return graph.replay


def _recover_from_capture() -> None:
    torch.cuda.synchronize()
    # A capture that CUDA broke off leaves torch's random generator in it; the next whole one takes it out.
    with torch.cuda.graph(torch.cuda.CUDAGraph()):
        torch.zeros(1, device="cuda")


def _elapsed_us(run: Callable[[], None]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1000.0 * float(start.elapsed_time(end))


def _repeats_for(one_pass_us: float) -> int:
    return max(1, min(64, round(_MINIMUM_SAMPLE_US / max(one_pass_us, 1.0))))


def _sample(take: Callable[[], float], budget_s: float) -> list[float]:
    samples: list[float] = []
    deadline = time.perf_counter() + budget_s
    while len(samples) < 5 or (time.perf_counter() < deadline and len(samples) < 1000):
        samples.append(take())
    return samples


def _host_us(function: Callable[[Inputs], Any], inputs: Inputs, latency_us: float) -> float:
    # Few enough calls that the launch queue never fills and makes the host wait for the GPU.
    calls = max(1, min(100, int(_HOST_BATCH_US / max(latency_us, 1.0))))

    def batch() -> float:
        torch.cuda.synchronize()
        start = time.perf_counter()
        for _ in range(calls):
            function(inputs)
        return 1e6 * (time.perf_counter() - start) / calls

    return statistics.median(batch() for _ in range(9))


def _measure_on_cpu(function: Callable[[Inputs], Any], input_sets: Sequence[Inputs], budget_s: float) -> Measurement:
    def one_pass() -> float:
        start = time.perf_counter()
        for inputs in input_sets:
            function(inputs)
        return 1e6 * (time.perf_counter() - start) / len(input_sets)

    one_pass()
    samples = [one_pass()]
    deadline = time.perf_counter() + budget_s
    while time.perf_counter() < deadline and len(samples) < 1000:
        samples.append(one_pass())
    return summarise(samples, len(input_sets), "cpu-clock")


def _clock_mhz(device: torch.device) -> float | None:
    try:
        return float(torch.cuda.clock_rate(device))
    except Exception:  # noqa: BLE001 - needs a vendor library that may be missing; the clock is a remark
        return None

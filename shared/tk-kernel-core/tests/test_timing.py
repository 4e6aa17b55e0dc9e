"""Timing: what is sampled, how samples are summed up, and on a GPU that neither cache nor queue is measured."""

from __future__ import annotations

import math
import statistics
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from pydantic import ValidationError

from tk_kernel_core import timing
from tk_kernel_core.device import current_device, known_device, known_devices
from tk_kernel_core.timing import MOST_INPUT_SETS, ROTATED_BYTES, Measurement, measure, rotated_inputs, summarise

if TYPE_CHECKING:
    from tk_kernel_core.spec import Inputs

MIB = 2**20


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A clock that only moves when it is told to, in seconds."""
    clock = SimpleNamespace(now=0.0)
    monkeypatch.setattr(timing.time, "perf_counter", lambda: clock.now)
    return clock


def test_summary() -> None:
    samples = [10.0, 14.0, 11.0, 13.0, 12.0, 1000.0, 9.0]
    got = summarise(samples, 8, "cuda-graph", note="remark", host_us=3.0)
    assert got.latency_us == 12.0
    assert got.spread_us == 14.0 - 10.0
    assert got.samples_us == tuple(samples)
    assert (got.calls_per_sample, got.method, got.note, got.host_us) == (8, "cuda-graph", "remark", 3.0)
    assert got.clock_mhz_before is None


def test_summary_of_few_samples() -> None:
    one = summarise([7.5], 1, "cpu-clock")
    assert (one.latency_us, one.spread_us, one.samples_us) == (7.5, 0.0, (7.5,))
    two = summarise([1.0, 3.0], 1, "cpu-clock")
    assert two.latency_us == 2.0
    assert two.spread_us > 0
    assert summarise([0.0, 0.0], 1, "cuda-events").latency_us == 0.0


def test_no_sample_is_no_measurement() -> None:
    with pytest.raises(ValueError, match="samples_us must hold at least one sample, got none"):
        summarise([], 1, "cuda-graph")


@pytest.mark.parametrize("odd", [1 / 3, 0.0, math.inf, math.nan, 5e-324])
def test_json_round_trip(odd: float) -> None:
    before = Measurement(
        latency_us=odd,
        spread_us=odd,
        samples_us=(odd, 1.0),
        calls_per_sample=3,
        method="cuda-graph",
        clock_mhz_before=odd,
    )
    after = Measurement.model_validate_json(before.model_dump_json())
    # Unlike the values, their spelling is the same for NaN too.
    assert repr(after) == repr(before)
    assert math.isnan(after.latency_us) == math.isnan(odd)


def test_a_measurement_is_checked_and_cannot_be_changed() -> None:
    got = summarise([1.0], 1, "cpu-clock")
    with pytest.raises(ValidationError):
        got.latency_us = 2.0
    with pytest.raises(ValidationError):
        summarise([1.0], 1, "stopwatch")


def inputs_of(n_bytes: int, seeds: list[int]) -> Any:
    def make(seed: int) -> Inputs:
        seeds.append(seed)
        quarter = torch.empty(n_bytes // 8, dtype=torch.bfloat16, device="meta")
        # Numbers have no size, and tensors count wherever they are.
        return {"x": torch.cat((quarter, quarter)), "eps": 1e-6, "rest": [quarter, (quarter.clone(), None)]}

    return make


def test_memory_that_several_inputs_share_counts_once() -> None:
    def make(seed: int) -> Inputs:
        memory = torch.empty(2, ROTATED_BYTES // 16, dtype=torch.int8, device="meta")
        # A slice of a large tensor counts as what is read of it.
        slice_of_more = torch.empty(ROTATED_BYTES, dtype=torch.int8, device="meta")[: ROTATED_BYTES // 8]
        return {"memory": memory, "halves": [*memory], "slice": slice_of_more}

    assert len(rotated_inputs(make, "cuda")) == 4


@pytest.mark.parametrize(
    ("n_bytes", "count"),
    [
        (ROTATED_BYTES // 32, 32),
        (ROTATED_BYTES // 32 + 1024, 32),
        (ROTATED_BYTES // 32 - 1024, 33),
        (ROTATED_BYTES // 2 - 1024, 3),
        # A set that is large alone has another to alternate with.
        (ROTATED_BYTES // 2, 2),
        (4 * ROTATED_BYTES, 2),
        (1024, MOST_INPUT_SETS),
        (0, MOST_INPUT_SETS),
    ],
)
def test_sets_for_a_gpu_are_several_times_its_caches(n_bytes: int, count: int) -> None:
    seeds: list[int] = []
    sets = rotated_inputs(inputs_of(n_bytes, seeds), "cuda")
    assert len(sets) == count
    # Every set has contents of its own.
    assert seeds == list(range(count))
    assert len({id(one) for one in sets}) == count


@pytest.mark.parametrize("n_bytes", [0, 1024, ROTATED_BYTES])
def test_a_cpu_has_one_set(n_bytes: int) -> None:
    seeds: list[int] = []
    assert len(rotated_inputs(inputs_of(n_bytes, seeds), "cpu")) == 1
    assert seeds == [0]


def test_a_gigabyte_is_several_times_the_largest_cache() -> None:
    cards = [known_device(card).l2_bytes.value for card in known_devices()]
    # The Infinity Cache of MI300X, which its L2 figure does not include.
    largest = max(256 * MIB, *filter(None, cards))
    assert 4 * largest <= ROTATED_BYTES
    assert 16 <= MOST_INPUT_SETS <= 256


@pytest.mark.parametrize("n_sets", [1, 3])
def test_cpu_samples_are_means_over_all_sets(clock: SimpleNamespace, n_sets: int) -> None:
    calls: list[int] = []

    def function(inputs: Inputs) -> None:
        calls.append(inputs["seed"])
        # Later sets take longer, and the very first call takes longest.
        clock.now += 5.0 if len(calls) == 1 else 0.001 * (1 + inputs["seed"])

    got = measure(function, [{"seed": seed} for seed in range(n_sets)], budget_s=0.05)
    mean_us = 1000.0 * (n_sets + 1) / 2
    assert got.method == "cpu-clock"
    assert got.calls_per_sample == n_sets
    assert got.samples_us == pytest.approx([mean_us] * len(got.samples_us))
    assert got.latency_us == pytest.approx(mean_us)
    assert (got.host_us, got.clock_mhz_before, got.note) == (None, None, "")
    # The first pass only warms up; every set is used as often as any other.
    assert len(got.samples_us) == len(calls) / n_sets - 1
    assert calls == list(range(n_sets)) * (1 + len(got.samples_us))
    assert 0.05 <= len(got.samples_us) * n_sets * mean_us / 1e6 <= 0.07


def test_a_slow_function_is_sampled_once(clock: SimpleNamespace) -> None:
    def function(inputs: Inputs) -> None:
        clock.now += 3.0

    got = measure(function, [{}], budget_s=0.0)
    assert (got.latency_us, got.spread_us, got.samples_us) == (3e6, 0.0, (3e6,))


def test_a_function_that_takes_no_time(clock: SimpleNamespace) -> None:
    got = measure(lambda inputs: None, [{}])
    assert got.latency_us == got.spread_us == 0.0
    assert 1 <= len(got.samples_us) <= 1000


def test_doing_nothing_by_the_real_clock() -> None:
    got = measure(lambda inputs: None, [{"x": torch.ones(1)}], budget_s=0.01)
    assert 0 <= got.latency_us < 1000
    assert math.isfinite(got.spread_us)
    assert got.latency_us == statistics.median(got.samples_us)


def test_without_inputs_there_is_nothing_to_measure() -> None:
    with pytest.raises(ValueError, match="input_sets must hold at least one set, got none"):
        measure(lambda inputs: None, [])


class Refusal(Exception):
    pass


def refuse(inputs: Inputs) -> None:
    raise Refusal


def test_what_the_function_raises_reaches_the_caller() -> None:
    with pytest.raises(Refusal):
        measure(refuse, [{"x": torch.ones(1)}])


def copy(inputs: Inputs) -> torch.Tensor:
    return inputs["x"].clone()


def gpu_set(n_bytes: int, seed: int = 0) -> Inputs:
    generator = torch.Generator("cuda").manual_seed(seed)
    return {"x": torch.randn(n_bytes // 4, generator=generator, device="cuda")}


def rotated(n_bytes: int) -> list[Inputs]:
    return rotated_inputs(lambda seed: gpu_set(n_bytes, seed), "cuda")


@pytest.mark.gpu
@pytest.mark.parametrize("n_bytes", [MIB, 8 * MIB, 64 * MIB])
def test_no_copy_is_faster_than_memory(n_bytes: int) -> None:
    peak = current_device().bandwidth_bytes_per_s.value
    if peak is None:
        pytest.skip("the bandwidth of this card is not known")
    got = measure(copy, rotated(n_bytes))
    assert (got.method, got.note) == ("cuda-graph", "")
    assert 2 * n_bytes / (got.latency_us * 1e-6) <= peak
    assert len(got.samples_us) >= 5


@pytest.mark.gpu
def test_rotation_keeps_inputs_out_of_the_cache() -> None:
    if torch.cuda.get_device_properties().L2_cache_size < 24 * MIB:
        pytest.skip("needs an L2 cache of 24 MiB, so that a copy is much faster from it")
    warm, cold = measure(copy, [gpu_set(8 * MIB)]), measure(copy, rotated(8 * MIB))
    assert cold.latency_us > warm.latency_us


@pytest.mark.gpu
def test_latency_is_that_of_one_call() -> None:
    def sleep(inputs: Inputs) -> None:
        torch.cuda._sleep(inputs["cycles"])

    def latency_us(cycles: int, n_sets: int) -> float:
        sets = [{"x": torch.ones(1, device="cuda"), "cycles": cycles}] * n_sets
        return measure(sleep, sets, budget_s=0.1).latency_us

    once = latency_us(200_000, 1)
    assert latency_us(200_000, 7) == pytest.approx(once, rel=0.3)
    assert latency_us(800_000, 1) == pytest.approx(4 * once, rel=0.3)


@pytest.mark.gpu
def test_host_time_does_not_wait_for_the_gpu() -> None:
    def sleep(inputs: Inputs) -> None:
        torch.cuda._sleep(2_000_000)

    got = measure(sleep, [gpu_set(4096)], budget_s=0.05)
    assert got.host_us is not None
    assert 0 < got.host_us < got.latency_us / 4


@pytest.mark.gpu
# PyTorch warns of a graph without a kernel.
@pytest.mark.filterwarnings("ignore:The CUDA Graph is empty:UserWarning")
def test_doing_nothing_on_a_gpu() -> None:
    got = measure(lambda inputs: None, [gpu_set(4096)], budget_s=0.05)
    assert math.isfinite(got.latency_us)
    assert got.latency_us >= 0
    assert got.host_us is not None
    assert got.host_us > 0


@pytest.mark.gpu
def test_every_input_set_is_used_as_often_as_any_other() -> None:
    sets = [{"count": torch.zeros((), dtype=torch.int64, device="cuda")} for _ in range(5)]
    got = measure(lambda inputs: inputs["count"].add_(1), sets, budget_s=0.05)
    counts = [int(one["count"]) for one in sets]
    assert got.method == "cuda-graph"
    assert got.calls_per_sample % len(sets) == 0
    assert min(counts[1:]) == max(counts[1:])
    assert min(counts) >= len(got.samples_us) * got.calls_per_sample / len(sets)


def wait(inputs: Inputs) -> torch.Tensor:
    return inputs["x"] * float(inputs["x"].sum())


def refuse_capture(inputs: Inputs) -> torch.Tensor:
    if torch.cuda.is_current_stream_capturing():
        raise Refusal("in two\nlines")
    return inputs["x"] * 2


@pytest.mark.gpu
@pytest.mark.parametrize("function", [wait, refuse_capture])
def test_without_a_graph_events_measure_and_the_process_goes_on(function: Any) -> None:
    sets = rotated(64 * 1024)
    got = measure(function, sets, budget_s=0.05)
    assert got.method == "cuda-events"
    assert got.note.startswith("no CUDA graph: ")
    assert "\n" not in got.note
    if function is refuse_capture:
        assert got.note == "no CUDA graph: Refusal: in two"
    assert got.latency_us > 0
    assert got.host_us is not None
    assert got.host_us > 0
    # Random numbers, allocations and graphs all work afterwards.
    x = torch.randn(1000, device="cuda")
    assert float((x + 1 - x).mean()) == pytest.approx(1.0)
    assert measure(copy, sets, budget_s=0.05).method == "cuda-graph"


@pytest.mark.gpu
def test_what_the_function_raises_on_a_gpu_reaches_the_caller() -> None:
    with pytest.raises(Refusal):
        measure(refuse, rotated(4096))
    assert measure(copy, [gpu_set(4096)], budget_s=0.05).method == "cuda-graph"

"""GPU targets: the ones compiled for, and the one of a device."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from tk_kernel_core import targets
from tk_kernel_core.targets import COMPILE_TARGETS, INTERPRETED_TARGET, Target, target_of

H200 = SimpleNamespace(
    major=9,
    minor=0,
    gcnArchName="NVIDIA H200",
    warp_size=32,
    multi_processor_count=132,
    shared_memory_per_block_optin=232_448,
)


@pytest.fixture
def cards(monkeypatch: pytest.MonkeyPatch) -> dict[int, SimpleNamespace]:
    """Properties of the devices PyTorch sees, by index; a new cache of targets."""
    properties: dict[int, SimpleNamespace] = {}
    monkeypatch.setattr(torch.cuda, "get_device_properties", properties.__getitem__)
    monkeypatch.setattr(torch.version, "hip", None)
    targets._gpu_target.cache_clear()
    yield properties
    targets._gpu_target.cache_clear()


def test_the_targets_every_kernel_is_compiled_for() -> None:
    assert list(COMPILE_TARGETS) == ["sm_80", "sm_90", "sm_100", "gfx942", "gfx950"]
    for name, target in COMPILE_TARGETS.items():
        assert target.name == name
        assert str(target.arch) == name.removeprefix("sm_")
        assert (target.backend, target.warp_size) == (("cuda", 32) if name.startswith("sm_") else ("hip", 64))
        assert isinstance(target.arch, int) == (target.backend == "cuda")
        # What compilers reserve per program is taken off, so the figure is no round one on NVIDIA's cards.
        assert 2**16 <= target.shared_bytes <= 2**18
        assert target.compute_units > 100


def test_hopper_or_later() -> None:
    later = [name for name, target in COMPILE_TARGETS.items() if target.is_hopper_or_later]
    assert later == ["sm_90", "sm_100"]
    ada = dataclasses.replace(COMPILE_TARGETS["sm_90"], name="sm_89", arch=89)
    assert not ada.is_hopper_or_later
    assert dataclasses.replace(ada, name="sm_120", arch=120).is_hopper_or_later


@pytest.mark.parametrize("target", COMPILE_TARGETS.values(), ids=lambda target: target.name)
def test_warps_hold_the_threads_that_are_asked_for(target: Target) -> None:
    for threads in (64, 128, 256, 512, 1024):
        assert target.warps(threads) * target.warp_size == threads
    # At least one, and no more threads than a program may have.
    assert [target.warps(threads) for threads in (0, 1, 16, 32)] == [1, 1, 1, 1]
    assert [target.warps(threads) * target.warp_size for threads in (1025, 2048, 2**40)] == [1024] * 3


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_other_devices_follow_the_interpreted_target(device: str) -> None:
    assert target_of(torch.device(device)) is INTERPRETED_TARGET
    assert INTERPRETED_TARGET.name == "sm_90"


def test_a_cuda_card_describes_itself(cards: dict[int, SimpleNamespace]) -> None:
    cards[0] = H200
    assert target_of(torch.device("cuda", 0)) == COMPILE_TARGETS["sm_90"]
    cards[1] = SimpleNamespace(**{**vars(H200), "major": 8, "minor": 9, "multi_processor_count": 58})
    cards[1].shared_memory_per_block_optin = 101_376
    assert target_of(torch.device("cuda", 1)) == Target("sm_89", "cuda", 89, 32, 58, 101_376)
    cards[2] = SimpleNamespace(**{**vars(H200), "major": 12})
    assert target_of(torch.device("cuda", 2)).arch == 120


def test_a_device_without_an_index_is_the_current_one(
    cards: dict[int, SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    cards |= {0: H200, 1: SimpleNamespace(**{**vars(H200), "multi_processor_count": 78})}
    for current, units in ((0, 132), (1, 78), (0, 132)):
        monkeypatch.setattr(torch.cuda, "current_device", lambda current=current: current)
        assert target_of(torch.device("cuda")).compute_units == units


def test_properties_are_read_once_per_card(cards: dict[int, SimpleNamespace]) -> None:
    cards |= {0: H200, 1: H200}
    first = target_of(torch.device("cuda", 0))
    del cards[0]
    assert target_of(torch.device("cuda", 0)) is first
    assert target_of(torch.device("cuda", 1)) == first


@pytest.mark.parametrize(
    ("reported", "arch", "warp_size", "shared_bytes"),
    [
        ("gfx942:sramecc+:xnack-", "gfx942", 64, 65_536),
        ("gfx950:sramecc+:xnack-", "gfx950", 64, 163_840),
        ("gfx1100", "gfx1100", 32, 65_536),
    ],
)
def test_a_hip_card_describes_itself(
    cards: dict[int, SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
    reported: str,
    arch: str,
    warp_size: int,
    shared_bytes: int,
) -> None:
    monkeypatch.setattr(torch.version, "hip", "7.0")
    # As PyTorch for ROCm has them: capabilities are no NVIDIA ones.
    cards[0] = SimpleNamespace(major=9, minor=4, gcnArchName=reported, warp_size=warp_size, multi_processor_count=38)
    target = target_of(torch.device("cuda", 0))
    assert target == Target(arch, "hip", arch, warp_size, 38, shared_bytes)
    assert not target.is_hopper_or_later


@pytest.mark.gpu
def test_the_card_of_this_machine() -> None:
    target = target_of(torch.device("cuda"))
    properties = torch.cuda.get_device_properties()
    assert target.compute_units == properties.multi_processor_count
    assert target.shared_bytes >= 2**16
    assert target is target_of(torch.device("cuda", torch.cuda.current_device()))

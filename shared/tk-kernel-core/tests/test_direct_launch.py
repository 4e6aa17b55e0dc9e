"""The launch that passes Triton's argument binder by, with a launcher that only takes notes: no GPU is needed."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton
from triton import knobs

from tk_kernel_core import launch as launch_module
from tk_kernel_core.launch import DIRECT_LAUNCH_TRITON_VERSIONS, Kernel, PreparedLaunch, recording

sys.path.append(str(Path(__file__).parent))

import sample_kernels

CUDA = torch.device("cuda", 0)
BLOCK = 64

pytestmark = [
    pytest.mark.compiler,
    pytest.mark.skipif(
        not triton.__version__.startswith(DIRECT_LAUNCH_TRITON_VERSIONS),
        reason="the direct launch is not taken with this Triton",
    ),
]


class NotedLaunch:
    """Arguments of one call of Triton's C launcher, in the order of Triton 3.6."""

    def __init__(self, *arguments: Any) -> None:
        self.grid, (self.stream, self.function) = arguments[:3], arguments[3:5]
        self.settings = arguments[5:10]
        self.metadata_and_hooks = arguments[10:13]
        self.arguments = tuple(
            argument.data_ptr() if isinstance(argument, torch.Tensor) else argument for argument in arguments[13:]
        )
        self.has_tensors = any(isinstance(argument, torch.Tensor) for argument in arguments[13:])

    @property
    def is_direct(self) -> bool:
        return self.metadata_and_hooks == (None, None, None) and not self.has_tensors

    @property
    def content(self) -> tuple[Any, ...]:
        """All that reaches the GPU."""
        return self.grid, self.stream, self.function, self.settings, self.arguments


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Any:
    """Make Triton and PyTorch believe in an H200 that takes note of launches on CPU tensors.

    Kernels are really compiled, and Triton's own launching code runs down to the C function.
    """
    from triton.backends.nvidia import driver as nvidia

    state = SimpleNamespace(launches=[], encoded=[], current_device=0, stream=4711, capturing=False)
    handles = itertools.count(1)

    def encode(address: int, *layout: Any) -> Any:
        state.encoded.append(address)
        return address, [list(part) if isinstance(part, (list, tuple)) else part for part in layout]

    utils = SimpleNamespace(
        load_binary=lambda name, *_: ("module", f"{name} {next(handles)}", 32, 0, 1024),
        get_device_properties=lambda _: {"max_shared_mem": 232_448},
        fill_tma_descriptor=encode,
    )
    driver = SimpleNamespace(
        get_current_target=lambda: triton.backends.compiler.GPUTarget("cuda", 90, 32),
        get_current_device=lambda: state.current_device,
        get_current_stream=lambda _: state.stream,
        launcher_cls=nvidia.CudaLauncher,
        utils=utils,
    )
    monkeypatch.setattr(triton.runtime.driver, "_active", driver)
    monkeypatch.setattr(triton.compiler.compiler, "max_shared_mem", lambda _: 232_448)
    launcher = SimpleNamespace(launch=lambda *arguments: state.launches.append(NotedLaunch(*arguments)))
    monkeypatch.setattr(nvidia, "compile_module_from_src", lambda **_: launcher)
    monkeypatch.setattr(nvidia, "library_dirs", list)
    for name in ("copy_kernel", "ragged_copy_kernel", "add_bias_kernel", "add_blocks_kernel"):
        function = getattr(sample_kernels, name)
        monkeypatch.setattr(function, "device_caches", collections.defaultdict(function.create_binder))

    @contextlib.contextmanager
    def device_guard(device: torch.device) -> Any:
        previous, state.current_device = state.current_device, device.index
        try:
            yield
        finally:
            state.current_device = previous

    monkeypatch.setattr(torch.version, "hip", None)
    monkeypatch.setattr(torch.cuda, "device", device_guard)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: state.current_device)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: state.capturing)
    monkeypatch.setattr(launch_module, "_HAS_STREAMS", True)
    monkeypatch.setattr(launch_module, "_current_device", lambda: state.current_device)
    monkeypatch.setattr(launch_module, "_current_stream", lambda index: state.stream + index)
    monkeypatch.delenv("TK_DIRECT_LAUNCH", raising=False)
    uncached = launch_module._direct_launch_is_safe.__wrapped__
    monkeypatch.setattr(launch_module, "_direct_launch_is_safe", functools.cache(uncached))
    return state


def prepare(kernel: str, *scalars: float, device: torch.device = CUDA, **options: Any) -> PreparedLaunch:
    return PreparedLaunch(
        Kernel("sample_kernels", kernel), (7, 3, 2), scalars, {"BLOCK": BLOCK}, device, num_warps=2, **options
    )


def directness(gpu: Any) -> list[bool]:
    return [launch.is_direct for launch in gpu.launches]


def addresses(*tensors: torch.Tensor) -> tuple[int, ...]:
    return tuple(tensor.data_ptr() for tensor in tensors)


@pytest.mark.parametrize(
    ("kernel", "scalars", "n_tensors"),
    [
        ("copy_kernel", (), 2),
        ("ragged_copy_kernel", (63,), 2),
        ("ragged_copy_kernel", (1,), 2),
        ("ragged_copy_kernel", (2**40,), 2),
        ("add_bias_kernel", (), 2),
        ("add_bias_kernel", (), 3),
    ],
)
@pytest.mark.parametrize("dependent", [False, True])
def test_the_second_launch_is_direct_and_the_same(
    gpu: Any, kernel: str, scalars: tuple[int, ...], n_tensors: int, dependent: bool
) -> None:
    launch = prepare(kernel, *scalars, launch_pdl=dependent)
    tensors = torch.empty(n_tensors, BLOCK)
    for _ in range(3):
        launch(*tensors)
    assert directness(gpu) == [False, True, True]
    first, second, third = gpu.launches
    assert first.content == second.content == third.content
    assert first.grid == (7, 3, 2)
    # Cooperative, dependent, no scratch memory of either kind, warps and clusters and shared memory.
    assert first.settings == (False, dependent, None, None, (2, 1, 0))
    absent = (None,) * (3 - n_tensors) if kernel == "add_bias_kernel" else ()
    assert first.arguments == (*addresses(*tensors), *absent, *scalars, BLOCK)


def test_other_tensors_of_the_same_alignment(gpu: Any) -> None:
    launch = prepare("copy_kernel")
    first, second = torch.empty(2, 2, BLOCK)
    launch(*first)
    launch(*second)
    launch(second[0], first[1])
    assert directness(gpu) == [False, True, True]
    assert [noted.arguments[:2] for noted in gpu.launches] == [
        addresses(*first),
        addresses(*second),
        addresses(second[0], first[1]),
    ]


def test_other_alignment_is_another_specialisation(gpu: Any) -> None:
    launch = prepare("copy_kernel")
    x, y = torch.empty(2, BLOCK + 4)
    # Which of the two tensors is off a multiple of 16 bytes; the odd ones come first as well as last.
    forms = {
        "neither": (x, y),
        "second": (x, y[1:]),
        "first": (x[1:], y),
        "both": (x[1:], y[1:]),
        "neither, four elements on": (x[4:], y[4:]),
    }
    for _ in range(3):
        for tensors in forms.values():
            launch(*tensors)
    assert directness(gpu) == [False] * 4 + [True] * 11
    for form, tensors in enumerate(forms.values()):
        noted = gpu.launches[form :: len(forms)]
        assert {one.arguments[:2] for one in noted} == {addresses(*tensors)}
        assert len({one.function for one in noted}) == 1
    neither, second, first, both, further = (noted.function for noted in gpu.launches[:5])
    assert neither == further
    assert len({neither, second, first, both}) == 4


def test_a_tensor_left_out_in_the_middle(gpu: Any) -> None:
    launch = PreparedLaunch(Kernel("sample_kernels", "add_bias_kernel"), (1, 1, 1), (), {"BLOCK": BLOCK}, CUDA)
    out, x = torch.empty(2, BLOCK)
    for tensors in ((out, x, None), (out, x[:0], None), (out, x, None)):
        launch(*tensors)
    assert directness(gpu) == [False, True, True]
    assert gpu.launches[0].content == gpu.launches[2].content
    assert gpu.launches[2].arguments == (*addresses(out, x), None, BLOCK)


def test_descriptors_are_encoded_once_for_an_address(gpu: Any) -> None:
    shape, constexprs = (16, 32), {"BLOCK_M": 16, "BLOCK_N": 32}
    kernel = Kernel("sample_kernels", "add_blocks_kernel")
    launch = PreparedLaunch(kernel, (1, 1, 1), (), constexprs, CUDA, {"x": shape, "y": shape})
    out, x, y, z = torch.empty(4, *shape)
    bias = torch.empty(shape[1])
    for second in (y, y, z, z, y):
        launch(out, x, bias, second)
    assert directness(gpu) == [False, True, True, True, True]
    assert gpu.encoded == [*addresses(x, y), *addresses(y, x), z.data_ptr()]
    assert [noted.content for noted in gpu.launches[:2]] == [gpu.launches[4].content] * 2
    assert gpu.launches[2].content == gpu.launches[3].content
    of_y, of_z = (noted.arguments for noted in gpu.launches[1:3])
    assert [(one, other) for one, other in zip(of_y, of_z, strict=True) if one != other] == [
        ((y.data_ptr(), of_y[7][1]), (z.data_ptr(), of_y[7][1]))
    ]


def test_a_tensor_that_no_descriptor_reaches_is_refused(gpu: Any) -> None:
    launch = PreparedLaunch(
        Kernel("sample_kernels", "add_blocks_kernel"),
        (1, 1, 1),
        (),
        {"BLOCK_M": 16, "BLOCK_N": 32},
        CUDA,
        {"x": (16, 32), "y": (16, 32)},
    )
    out, x, y = torch.empty(3, 16, 32)
    launch(out, x, torch.empty(32), y)
    with pytest.raises(AssertionError, match="16-byte aligned"):
        launch(out, x, torch.empty(32), torch.empty(16 * 32 + 1)[1:].view(16, 32))
    assert len(gpu.launches) == 1


def test_the_stream_is_asked_for_every_time(gpu: Any) -> None:
    launch, tensors = prepare("copy_kernel"), torch.empty(2, BLOCK)
    for stream in (10, 20, 30):
        gpu.stream = stream
        launch(*tensors)
    assert directness(gpu) == [False, True, True]
    assert [noted.stream for noted in gpu.launches] == [10, 20, 30]


@pytest.mark.parametrize("side", ["launch_enter_hook", "launch_exit_hook"])
def test_a_profiler_sees_launches_while_it_listens(gpu: Any, side: str) -> None:
    launch, tensors = prepare("copy_kernel"), torch.empty(2, BLOCK)
    hooks = getattr(knobs.runtime, side)

    def hook(metadata: Any) -> None: ...

    launch(*tensors)
    hooks.add(hook)
    try:
        launch(*tensors)
        launch(*tensors)
    finally:
        hooks.remove(hook)
    launch(*tensors)
    assert directness(gpu) == [False, False, False, True]
    assert gpu.launches[1].metadata_and_hooks[0].get()["name"] == "copy_kernel"


def test_while_another_device_is_current(gpu: Any) -> None:
    launch, tensors = prepare("copy_kernel"), torch.empty(2, BLOCK)
    launch(*tensors)
    gpu.current_device = 1
    launch(*tensors)
    assert gpu.current_device == 1
    gpu.current_device = 0
    launch(*tensors)
    assert directness(gpu) == [False, False, True]
    assert len({noted.function for noted in gpu.launches}) == 1


def test_recording_goes_through_triton_and_describes(gpu: Any) -> None:
    launch, tensors = prepare("copy_kernel"), torch.empty(2, BLOCK)
    launch(*tensors)
    with recording() as launches:
        launch(*tensors)
    launch(*tensors)
    assert directness(gpu) == [False, False, True]
    assert launches == [launch.describe(*tensors)]


@pytest.mark.parametrize("reason", ["environment", "Triton", "HIP", "torch without CUDA"])
def test_where_it_is_not_known_to_be_safe(gpu: Any, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if reason == "environment":
        monkeypatch.setenv("TK_DIRECT_LAUNCH", "0")
    elif reason == "Triton":
        monkeypatch.setattr(triton, "__version__", "3.60.0")
    elif reason == "HIP":
        monkeypatch.setattr(torch.version, "hip", "7.0")
    else:
        monkeypatch.setattr(launch_module, "_HAS_STREAMS", False)
    launch, tensors = prepare("copy_kernel"), torch.empty(2, BLOCK)
    for _ in range(3):
        launch(*tensors)
    assert directness(gpu) == [False] * 3
    assert len({noted.function for noted in gpu.launches}) == 1


def test_a_device_without_an_index_is_not_assumed_to_be_the_current_one(gpu: Any) -> None:
    launch, tensors = prepare("copy_kernel", device=torch.device("cuda")), torch.empty(2, BLOCK)
    launch(*tensors)
    gpu.current_device = 0
    launch(*tensors)
    assert directness(gpu) == [False, False]


def test_a_cold_kernel_is_not_compiled_during_capture(gpu: Any) -> None:
    launch, tensors = prepare("copy_kernel"), torch.empty(2, BLOCK + 1)[:, 1:]
    gpu.capturing = True
    with pytest.raises(RuntimeError, match=r"copy_kernel is not compiled .* make one call with the same shapes"):
        launch(*tensors)
    # Compiled, but not loaded: loading is as impossible.
    sample_kernels.copy_kernel.warmup(*tensors, BLOCK=BLOCK, num_warps=2, grid=(1,))
    with pytest.raises(RuntimeError, match="is not compiled"):
        launch(*tensors)
    assert gpu.launches == []
    gpu.capturing = False
    launch(*tensors)
    launch(*tensors)
    assert directness(gpu) == [False, True]


def test_a_warm_kernel_is_captured(gpu: Any) -> None:
    tensors = torch.empty(2, BLOCK)
    prepare("copy_kernel")(*tensors)
    gpu.capturing = True
    launch = prepare("copy_kernel")
    launch(*tensors)
    launch(*tensors)
    assert directness(gpu) == [False, False, True]
    with pytest.raises(RuntimeError, match="is not compiled for these arguments"):
        launch(tensors[0], torch.empty(BLOCK + 1)[1:])
    with pytest.raises(RuntimeError, match="is not compiled for these arguments"):
        prepare("copy_kernel")(*tensors.to(torch.bfloat16))
    assert len(gpu.launches) == 3


@pytest.mark.parametrize("kind", ["global_scratch_size", "profile_scratch_size"])
def test_a_kernel_with_scratch_memory_is_refused(kind: str) -> None:
    sizes = {"global_scratch_size": 0, "profile_scratch_size": 0, kind: 16}
    with pytest.raises(RuntimeError, match="the kernel norm_kernel needs scratch memory"):
        launch_module._direct_launch(SimpleNamespace(name="norm_kernel", run=SimpleNamespace(**sizes)), ())

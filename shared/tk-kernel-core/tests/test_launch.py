"""Descriptions, recording and planning of launches, and what is kept between calls; no kernel is compiled."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch

from tk_kernel_core.launch import (
    Kernel,
    KernelLaunch,
    PlanCache,
    PreparedLaunch,
    TensorArgument,
    allocator,
    is_planning,
    launch_target,
    planning,
    recording,
)
from tk_kernel_core.targets import COMPILE_TARGETS, INTERPRETED_TARGET

if TYPE_CHECKING:
    from triton.language import constexpr

sys.path.append(str(Path(__file__).parent))

CPU, META = torch.device("cpu"), torch.device("meta")


class FakeFunction:
    """Stands for a `triton.jit` function on the CPU: notes how it is launched."""

    arg_names = ("out_ptr", "x_ptr", "bias_ptr", "n_elements", "factor", "EVEN", "BLOCK")

    @staticmethod
    def fn(
        out_ptr: Any,
        x_ptr: Any,
        bias_ptr: Any,
        n_elements: int,
        factor: float,
        EVEN: constexpr,  # noqa: N803 - as kernels write their compile-time parameters
        BLOCK: constexpr = 32,  # noqa: N803
    ) -> None:
        """Nothing: only the signature is looked at."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    def __getitem__(self, grid: tuple[int, int, int]) -> Callable[..., None]:
        return lambda *arguments, **keywords: self.calls.append((grid, arguments, keywords))


@pytest.fixture
def function() -> FakeFunction:
    return FakeFunction()


@pytest.fixture
def prepare(function: FakeFunction) -> Callable[..., PreparedLaunch]:
    def prepare(
        device: torch.device = CPU,
        scalars: tuple[Any, ...] = (64, 0.5),
        constexprs: dict[str, Any] | None = None,
        **options: Any,
    ) -> PreparedLaunch:
        constexprs = {"EVEN": True, "BLOCK": 32} if constexprs is None else constexprs
        kernel = Kernel("a_module", "a_kernel")
        vars(kernel)["function"] = function
        return PreparedLaunch(kernel, (3, 2, 1), scalars, constexprs, device, **options)

    return prepare


Prepare = Callable[..., PreparedLaunch]


def in_fresh_process(script: str) -> str:
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def test_a_kernel_is_found_by_module_and_name() -> None:
    kernel = Kernel("sample_kernels", "copy_kernel")
    import sample_kernels

    assert kernel.function is sample_kernels.copy_kernel
    assert repr(kernel) == "Kernel(sample_kernels.copy_kernel)"


def test_a_kernel_is_not_imported_before_it_is_needed() -> None:
    assert Kernel("no_such_module", "no_kernel").name == "no_kernel"
    script = """
import sys
from tk_kernel_core.launch import Kernel
Kernel("colorsys", "rgb_to_yiq")
print({"colorsys", "triton"} & set(sys.modules))
"""
    assert in_fresh_process(script) == "set()"


def test_another_missing_module_is_not_taken_for_triton() -> None:
    with pytest.raises(ModuleNotFoundError, match="no_such_module") as caught:
        _ = Kernel("no_such_module", "no_kernel").function
    assert caught.value.name == "no_such_module"


def test_without_triton_the_error_says_what_to_install() -> None:
    script = """
import importlib.abc, sys

class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "triton":
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Blocker())
import torch
from tk_kernel_core.launch import Kernel, PreparedLaunch
launch = PreparedLaunch(Kernel("a_module", "norm_kernel"), (1, 1, 1), (), {}, torch.device("cpu"))
try:
    launch(torch.ones(1))
except ModuleNotFoundError as error:
    assert type(error) is ModuleNotFoundError and error.name == "triton" and error.__cause__ is not None
    print(error)
"""
    said = in_fresh_process(script)
    assert said.startswith("the kernel norm_kernel needs triton, which is not installed")
    assert "beside a CPU build, install triton itself" in said


def test_description(prepare: Prepare, function: FakeFunction) -> None:
    out, x = torch.empty(64, dtype=torch.bfloat16, device="meta"), torch.empty(65, device="meta")[1:]
    launch = prepare(META, num_warps=4, launch_pdl=True)
    assert launch.describe(out, x) == KernelLaunch(
        module="a_module",
        kernel="a_kernel",
        grid=(3, 2, 1),
        arguments=(
            ("out_ptr", TensorArgument("bfloat16", aligned=True)),
            ("x_ptr", TensorArgument("float32", aligned=False)),
            ("bias_ptr", None),
            ("n_elements", 64),
            ("factor", 0.5),
            ("EVEN", True),
            ("BLOCK", 32),
        ),
        options=(("launch_pdl", True), ("num_warps", 4)),
    )
    assert launch.describe(out, None, x).arguments[1:3] == (
        ("x_ptr", None),
        ("bias_ptr", TensorArgument("float32", False)),
    )
    assert function.calls == []


@pytest.mark.parametrize("offset_bytes", [0, 1, 2, 4, 8, 15, 16, 24, 32], ids=lambda offset: f"{offset} bytes")
def test_sixteen_bytes_are_aligned(prepare: Prepare, offset_bytes: int) -> None:
    x = torch.empty(64, dtype=torch.int8, device="meta")[offset_bytes:]
    (_, argument), *_ = prepare(META).describe(x).arguments
    assert argument == TensorArgument("int8", offset_bytes % 16 == 0)


@pytest.mark.parametrize(
    "changes",
    [
        {"constexprs": {"BLOCK": 32, "EVEN": True}},
        {"constexprs": {"EVEN": True, "BLOCKS": 32}},
        {"constexprs": {"BLOCK": 32}, "scalars": (64, 0.5, 1, 2, 3, 4)},
        {"constexprs": {}},
        {"scalars": (64, 0.5, 1, 2)},
    ],
    ids=["order", "name", "missing", "left to their defaults", "scalars"],
)
def test_arguments_that_do_not_fit_the_kernel_are_refused(prepare: Prepare, changes: dict[str, Any]) -> None:
    x = torch.empty(64, device="meta")
    with pytest.raises(TypeError, match=r"Kernel\(a_module.a_kernel\) takes .*'EVEN', 'BLOCK'.* with constexprs \["):
        prepare(META, **changes).describe(x, x, x)


def test_on_a_cpu_triton_launches(prepare: Prepare, function: FakeFunction) -> None:
    out, x = torch.empty(64), torch.empty(65)[1:]
    launch = prepare(num_warps=4)
    for _ in range(3):
        launch(out, x)
    launch(out, None, x)
    keywords = {"EVEN": True, "BLOCK": 32, "num_warps": 4}
    assert len(function.calls) == 4
    for grid, arguments, given in function.calls:
        assert (grid, given, arguments[3:]) == ((3, 2, 1), keywords, (64, 0.5))
    assert all(arguments[0] is out and arguments[1] is x for _, arguments, _ in function.calls[:3])
    assert [arguments[2] for _, arguments, _ in function.calls[:3]] == [None] * 3
    assert function.calls[3][1][1] is None
    assert function.calls[3][1][2] is x


def test_recorded_launches_still_run(prepare: Prepare, function: FakeFunction) -> None:
    x = torch.empty(64)
    launch = prepare()
    launch(x, x)
    with recording() as launches:
        launch(x, x, x)
        assert not is_planning()
        launch(x)
    launch(x, x)
    assert launches == [launch.describe(x, x, x), launch.describe(x)]
    assert len(function.calls) == 4


def test_planned_launches_do_not_run(prepare: Prepare, function: FakeFunction) -> None:
    x = torch.empty(64, device="meta")
    with planning(COMPILE_TARGETS["gfx942"]) as launches:
        assert is_planning()
        assert launch_target(META) is COMPILE_TARGETS["gfx942"]
        prepare(META)(x, x)
    assert launches == [prepare(META).describe(x, x)]
    assert function.calls == []
    assert not is_planning()
    assert launch_target(CPU) is launch_target(META) is INTERPRETED_TARGET


def test_blocks_nest(prepare: Prepare, function: FakeFunction) -> None:
    x, real = torch.empty(64, device="meta"), torch.empty(64)
    with recording() as outer:
        with planning(COMPILE_TARGETS["sm_80"]) as first:
            with planning(COMPILE_TARGETS["sm_100"]) as second:
                assert launch_target(META).name == "sm_100"
                prepare(META)(x)
            assert launch_target(META).name == "sm_80"
            prepare(META)(x, x)
        assert not is_planning()
        prepare()(real, real, real)
    prepare()(real)
    assert outer == [prepare().describe(real, real, real)]
    assert first == [prepare(META).describe(x, x)]
    assert second == [prepare(META).describe(x)]
    assert len(function.calls) == 2


def fail() -> None:
    raise KeyError


def test_an_error_ends_recording_and_planning(prepare: Prepare, function: FakeFunction) -> None:
    with pytest.raises(KeyError), planning(COMPILE_TARGETS["sm_80"]) as launches:
        fail()
    assert not is_planning()
    prepare()(torch.empty(64))
    assert launches == []
    assert len(function.calls) == 1


@pytest.mark.interpreter
def test_recording_in_the_interpreter_gives_description_and_result() -> None:
    x, bias = torch.randn(64), torch.randn(64)
    out = torch.empty(64)
    launch = PreparedLaunch(Kernel("sample_kernels", "add_bias_kernel"), (1, 1, 1), (), {"BLOCK": 64}, CPU)
    with recording() as launches:
        launch(out, x, bias)
    assert torch.equal(out, x + bias)
    assert [dict(launch.arguments)["BLOCK"] for launch in launches] == [64]
    launch(out, x)
    assert torch.equal(out, x)


def test_plans_are_kept_for_real_tensors_only() -> None:
    plans: PlanCache[str] = PlanCache()
    assert plans.remember("a", "plan a", CPU) == "plan a"
    assert plans.remember("b", "plan b", torch.device("cuda", 0)) == "plan b"
    # What is planned for meta tensors depends on whether, and for which target, launches are being planned.
    assert plans.remember("c", "plan c", META) == "plan c"
    assert plans == {"a": "plan a", "b": "plan b"}


def test_a_plan_is_made_once_for_tensors_that_lie_alike() -> None:
    plans: PlanCache[int] = PlanCache()
    made = iter(range(100))

    def plan(*tensors: object, form: tuple[object, ...] = ("sum",)) -> int:
        return plans.plan_for(form, tensors, lambda: next(made))

    x = torch.ones(3, 4)
    assert [plan(x), plan(torch.zeros(3, 4)), plan(x, None), plan(x, None)] == [0, 0, 1, 1]
    assert [plan(x, form=("mean",)), plan(x.half()), plan(x[:2]), plan(torch.ones(4, 3).T), plan(x)] == [2, 3, 4, 5, 0]


def test_who_makes_the_plan_says_what_is_wrong_with_an_argument() -> None:
    plans: PlanCache[int] = PlanCache()

    def refuse() -> int:
        raise TypeError("x must be a tensor, got int")

    for form, x in ((("sum",), 3), (([],), torch.ones(2))):
        with pytest.raises(TypeError, match=r"^x must be a tensor, got int$"):
            plans.plan_for(form, (x,), refuse)
    assert not plans


def test_the_number_of_plans_is_bounded() -> None:
    plans: PlanCache[int] = PlanCache()
    for key in range(3 * PlanCache.LIMIT + 5):
        assert plans.remember(key, -key, CPU) == -key
        assert plans[key] == -key
        assert len(plans) <= PlanCache.LIMIT
    assert PlanCache.LIMIT >= 1024


@pytest.mark.parametrize("shape", [(), (0,), (3, 5), torch.Size([2, 0, 4])], ids=str)
def test_allocator(shape: tuple[int, ...]) -> None:
    allocate = allocator(shape, torch.bfloat16, CPU)
    first, second = allocate(), allocate()
    for tensor in (first, second):
        assert (tuple(tensor.shape), tensor.dtype, tensor.device) == (tuple(shape), torch.bfloat16, CPU)
        assert tensor.is_contiguous()
        assert tensor.stride() == torch.empty(shape).stride()
    assert first.numel() == 0 or first.data_ptr() != second.data_ptr()


@pytest.mark.gpu
def test_allocator_on_every_gpu() -> None:
    for index in range(torch.cuda.device_count()):
        device = torch.device("cuda", index)
        tensor = allocator((3, 5), torch.float16, device)()
        assert (tensor.device, tensor.dtype, tensor.stride()) == (device, torch.float16, (5, 1))

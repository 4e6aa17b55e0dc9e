"""Launching Triton kernels with little host time.

Triton binds, specialises and hashes all arguments of a kernel on every call. A `PreparedLaunch` does that
once for everything except the tensors' addresses: later calls hand the addresses straight to the compiled
kernel's launcher. Where that is not known to be safe (another Triton version, HIP, the interpreter, an
attached profiler), the call goes through `kernel[grid](...)`. `TK_DIRECT_LAUNCH=0` forces the latter.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import inspect
import operator
import os
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Generic, TypeVar

import torch

from tk_kernel_core.descriptors import launch_by_address, through_descriptors
from tk_kernel_core.gemm import PreparedProduct
from tk_kernel_core.interpreter import interpreting, prepare_interpreter
from tk_kernel_core.targets import Target, target_of

if TYPE_CHECKING:
    from triton import JITFunction

DIRECT_LAUNCH_TRITON_VERSIONS = ("3.6.",)
"""Triton releases whose launcher signature the direct call below was written and tested for."""

_ALIGNMENT_BYTES = 16

_address_of: Callable[[Any], int] = torch.Tensor.data_ptr
# A build of torch without CUDA or HIP lacks them, and has no launch that would need them.
_HAS_STREAMS = hasattr(torch._C, "_cuda_getCurrentRawStream")
_current_device: Callable[[], int | None] = torch._C._cuda_getDevice if _HAS_STREAMS else lambda: None
_current_stream: Callable[[int], int] = torch._C._cuda_getCurrentRawStream if _HAS_STREAMS else lambda index: 0


class Kernel:
    """A Triton kernel by module and name, imported when it is first needed.

    A package can so be imported, and its reference used, where triton is missing.
    """

    def __init__(self, module: str, name: str) -> None:
        self.module = module
        self.name = name

    def __repr__(self) -> str:
        return f"Kernel({self.module}.{self.name})"

    @functools.cached_property
    def function(self) -> JITFunction:
        """The `triton.jit` function.

        Raises:
            ModuleNotFoundError: triton is not installed.
        """
        try:
            importlib.import_module("triton")
        except ModuleNotFoundError as error:
            raise ModuleNotFoundError(
                f"the kernel {self.name} needs triton, which is not installed: CUDA and ROCm builds of torch "
                f"bring it along; beside a CPU build, install triton itself",
                name="triton",
            ) from error
        if interpreting():
            prepare_interpreter()
        function: JITFunction = getattr(importlib.import_module(self.module), self.name)
        return function

    @property
    def constexpr_names(self) -> tuple[str, ...]:
        """The compile-time parameters, in order, those with a default included."""
        parameters = inspect.signature(self.function.fn).parameters.values()
        return tuple(parameter.name for parameter in parameters if "constexpr" in str(parameter.annotation))


@dataclass(frozen=True, slots=True)
class TensorArgument:
    """What compilation knows of a tensor argument.

    Attributes:
        dtype: Element type, for example `bfloat16`.
        aligned: Whether the address is a multiple of 16 bytes.
    """

    dtype: str
    aligned: bool


@dataclass(frozen=True, slots=True)
class DescriptorArgument:
    """What compilation knows of a tensor that is read block by block through a descriptor.

    Attributes:
        dtype: Element type.
        block: Shape of a block.
    """

    dtype: str
    block: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class KernelLaunch:
    """One launch of a kernel, described without addresses.

    Attributes:
        module: Import path of the module that holds the kernel.
        kernel: Name of the `triton.jit` function.
        grid: Number of programs along each axis.
        arguments: All arguments by parameter name, constexprs included, in the kernel's order.
        options: Launch options such as `num_warps`, by name.
    """

    module: str
    kernel: str
    grid: tuple[int, int, int]
    arguments: tuple[tuple[str, Any], ...]
    options: tuple[tuple[str, Any], ...]


_recorder: list[KernelLaunch] | None = None
_planned_target: Target | None = None


def is_planning() -> bool:
    """Whether launches are being planned on meta tensors instead of run."""
    return _planned_target is not None


def launch_target(device: torch.device) -> Target:
    """Return the target to choose launches for: the planned one for meta tensors, else the device's own."""
    return _planned_target if _planned_target and device.type == "meta" else target_of(device)


@contextlib.contextmanager
def recording() -> Iterator[list[KernelLaunch]]:
    """Collect a description of every launch made in the block; the launches still run."""
    global _recorder
    launches: list[KernelLaunch] = []
    previous = _recorder
    _recorder = launches
    try:
        yield launches
    finally:
        _recorder = previous


@contextlib.contextmanager
def planning(target: Target) -> Iterator[list[KernelLaunch]]:
    """Collect the launches that the block's calls on meta tensors would make on a target; none runs."""
    global _planned_target
    previous, _planned_target = _planned_target, target
    try:
        with recording() as launches:
            yield launches
    finally:
        _planned_target = previous


PlanT = TypeVar("PlanT")


class PlanCache(dict[Hashable, PlanT], Generic[PlanT]):
    """Prepared calls by everything they depend on: shapes, strides, dtypes, device, flags.

    Bounded, because serving meets a new token count in almost every step.
    """

    LIMIT = 4096

    def remember(self, key: Hashable, plan: PlanT, device: torch.device) -> PlanT:
        """Keep a plan for the next call with this key, and return it.

        Plans for meta tensors are not kept: they depend on whether launches are being planned.
        """
        if device.type != "meta":
            if len(self) >= self.LIMIT:
                self.pop(next(iter(self)), None)
            self[key] = plan
        return plan

    def plan_for(self, form: tuple[Hashable, ...], tensors: tuple[Any, ...], make: Callable[[], PlanT]) -> PlanT:
        """Return the plan for tensors like these, made only once.

        Args:
            form: All else that the plan depends on.
            tensors: The first is none of those left out, which are None.
            make: Checks the arguments, and makes the plan.
        """
        try:
            places = (part is not None and (part.shape, part.stride(), part.dtype, part.device) for part in tensors)
            plan = self.get(key := (*form, *places))
        except (AttributeError, TypeError):
            make()  # Some argument is not what it should be; the checks say which.
            raise
        return self.remember(key, make(), tensors[0].device) if plan is None else plan


class PreparedLaunch:
    """A kernel launch with everything fixed except which tensors, of the same dtypes, it works on.

    Args:
        kernel: The kernel. Its parameters are tensors first, then scalars, then constexprs.
        grid: Number of programs along each axis.
        scalars: The scalar arguments, in order.
        constexprs: The compile-time arguments, by name, in the kernel's order.
        device: Where the tensors live.
        blocks: By name, the tensors that the kernel reads through descriptors, and the shape of the blocks. Such a
            tensor begins at a multiple of 16 bytes and so do its rows, neighbouring elements follow one another,
            it is not empty, and its shape and strides are the same in every call.
        options: `num_warps` and further options of Triton's backend.
    """

    __slots__ = (
        "_blocks",
        "_constexprs",
        "_device",
        "_direct",
        "_grid",
        "_index",
        "_kernel",
        "_options",
        "_rest",
        "_scalars",
    )

    def __init__(
        self,
        kernel: Kernel,
        grid: tuple[int, int, int],
        scalars: tuple[int | float | bool, ...],
        constexprs: Mapping[str, Any],
        device: torch.device,
        blocks: Mapping[str, tuple[int, ...]] | None = None,
        /,
        **options: Any,
    ) -> None:
        self._blocks = blocks or {}
        self._kernel = kernel
        self._grid = grid
        self._scalars = scalars
        self._constexprs = dict(constexprs)
        self._device = device
        self._index = device.index
        self._options = options
        self._rest = (*scalars, *constexprs.values())
        self._direct: dict[object, tuple[Any, ...]] = {}

    @classmethod
    def of(cls, prepared: PreparedProduct, device: torch.device) -> PreparedLaunch:
        """Return the launch that a package's launch module has prepared."""
        kernel, blocks = Kernel(prepared.module, prepared.kernel), prepared.blocks
        return cls(kernel, prepared.grid, prepared.scalars, prepared.constexprs, device, blocks, **prepared.options)

    def __call__(self, *tensors: torch.Tensor | None) -> None:
        """Launch on the tensors' device and its current stream.

        Args:
            tensors: The tensor arguments in the kernel's order, as many and of the same dtypes in every call;
                None for one that is left out, in every call. Those left out at the end need not be named.

        Raises:
            RuntimeError: The kernel is not compiled yet and the stream is capturing a CUDA graph.
        """
        addresses: list[Any]
        offsets = 0
        try:
            addresses = [*map(_address_of, tensors)]
            for address in addresses:
                offsets |= address
        except TypeError:
            # Some tensor is left out.
            addresses = [None if tensor is None else tensor.data_ptr() for tensor in tensors]
            offsets = functools.reduce(operator.or_, filter(None, addresses), 0)
        key: object = 0
        if offsets % _ALIGNMENT_BYTES:
            key = tuple(address and address % _ALIGNMENT_BYTES for address in addresses)
        direct = self._direct.get(key)
        if direct is None or _recorder is not None or _current_device() != self._index:
            self._launch_by_triton(key, tensors)
            return
        launch, middle, described, tail, enter_hooks, exit_hooks = direct
        if enter_hooks or exit_hooks:
            self._launch_by_triton(key, tensors)
            return
        # From the last on, so that the positions of those before stay what they are.
        for position, arguments_for in described:
            addresses[position : position + 1] = arguments_for(addresses[position])
        launch(*self._grid, _current_stream(self._index), *middle, *addresses, *tail)

    def describe(self, *tensors: torch.Tensor | None) -> KernelLaunch:
        """Return the description of the launch on these tensors."""
        names = self._kernel.function.arg_names
        described = [self._describe(name, tensor) for name, tensor in zip(names, tensors, strict=False)]
        values = (*described, *self._absent(len(described)), *self._rest)
        constexprs = self._kernel.constexpr_names
        last = tuple(names[len(names) - len(constexprs) :])
        if not last == constexprs == tuple(self._constexprs) or len(names) != len(values):
            raise TypeError(f"{self._kernel} takes {names}, was prepared with constexprs {list(self._constexprs)}")
        return KernelLaunch(
            self._kernel.module,
            self._kernel.name,
            self._grid,
            tuple(zip(names, values, strict=True)),
            tuple(sorted(self._options.items())),
        )

    def _describe(self, name: str, tensor: torch.Tensor | None) -> TensorArgument | DescriptorArgument | None:
        if tensor is None:
            return None
        dtype = str(tensor.dtype).removeprefix("torch.")
        if name in self._blocks:
            return DescriptorArgument(dtype, self._blocks[name])
        return TensorArgument(dtype, tensor.data_ptr() % _ALIGNMENT_BYTES == 0)

    def _absent(self, n_tensors: int) -> tuple[None, ...]:
        """None for each tensor parameter after the first `n_tensors`."""
        return (None,) * (len(self._kernel.function.arg_names) - len(self._rest) - n_tensors)

    def _launch_by_triton(self, key: object, tensors: tuple[torch.Tensor | None, ...]) -> None:
        if _recorder is not None:
            _recorder.append(self.describe(*tensors))
        if self._device.type == "meta":
            return
        names = self._kernel.function.arg_names
        arguments = (*through_descriptors(tensors, names, self._blocks), *self._absent(len(tensors)), *self._scalars)
        if self._device.type != "cuda":
            self._kernel.function[self._grid](*arguments, **self._constexprs, **self._options)
            return
        with torch.cuda.device(self._device):
            if torch.cuda.is_current_stream_capturing() and not self._is_compiled(arguments):
                raise RuntimeError(
                    f"the kernel {self._kernel.name} is not compiled for these arguments yet, and compiling is not "
                    f"possible while a CUDA graph is being captured: make one call with the same shapes and dtypes "
                    f"before the capture"
                )
            compiled = self._kernel.function[self._grid](*arguments, **self._constexprs, **self._options)
        if _direct_launch_is_safe():
            tail = (*self._absent(len(tensors)), *self._rest)
            self._direct[key] = _direct_launch(compiled, tail, arguments[: len(tensors)])

    def _is_compiled(self, arguments: tuple[Any, ...]) -> bool:
        """Whether Triton holds this kernel loaded on the current device."""
        from triton import knobs
        from triton.runtime.jit import compute_cache_key

        function = self._kernel.function
        kernels, keys, _, _, bind = function.device_caches[torch.cuda.current_device()]
        _, specialization, options = bind(
            *arguments,
            **self._constexprs,
            **self._options,
            debug=function.debug or knobs.runtime.debug,
            instrumentation_mode=knobs.compilation.instrumentation_mode,
        )
        compiled = kernels.get(compute_cache_key(keys, specialization, options))
        return compiled is not None and compiled.module is not None


def _direct_launch(compiled: Any, tail: tuple[Any, ...], tensors: tuple[Any, ...] = ()) -> tuple[Any, ...]:
    """Return Triton's C launcher of a loaded kernel, its arguments around the addresses, and the profilers' lists.

    Triton keeps a loaded kernel for the life of the process.
    """
    from triton import knobs

    runner = compiled.run
    if runner.global_scratch_size or runner.profile_scratch_size:
        raise RuntimeError(f"the kernel {compiled.name} needs scratch memory, which a direct launch does not allocate")
    no_scratch, no_hooks = (None, None), (None, None, None)
    middle = (
        compiled.function,
        runner.launch_cooperative_grid,
        runner.launch_pdl,
        *no_scratch,
        compiled.packed_metadata,
        *no_hooks,
    )
    launch, described = launch_by_address(compiled, tensors)
    hooks = knobs.runtime
    return launch, middle, described, tail, hooks.launch_enter_hook.calls, hooks.launch_exit_hook.calls


@functools.cache
def _direct_launch_is_safe() -> bool:
    import triton

    return (
        os.environ.get("TK_DIRECT_LAUNCH", "1") != "0"
        and torch.version.hip is None
        and triton.__version__.startswith(DIRECT_LAUNCH_TRITON_VERSIONS)
        and _HAS_STREAMS
    )


def allocator(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Callable[[], torch.Tensor]:
    """Return a function that allocates an uninitialised contiguous tensor."""
    sizes = tuple(shape)
    strides = torch.empty(sizes, device="meta").stride()
    # What compiled graphs allocate with: a third of the host time of torch.empty.
    allocate_on_current = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)
    if device.type != "cuda" or allocate_on_current is None:
        return lambda: torch.empty(sizes, dtype=dtype, device=device)

    index = device.index

    def allocate() -> torch.Tensor:
        if _current_device() == index:
            tensor: torch.Tensor = allocate_on_current(sizes, strides, dtype)
            return tensor
        return torch.empty(sizes, dtype=dtype, device=device)

    return allocate

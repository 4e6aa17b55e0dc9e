"""Ahead-of-time compilation of kernel launches, for any target and with no GPU.

A launch is specialised by Triton's own argument binder and compiled by Triton's own compiler, so the machine
code is what a call on such a device would run. Triton's compiler keeps global state: two threads that compile
at once can change each other's machine code. Compile from one thread.
"""

from __future__ import annotations

import functools
from collections.abc import Hashable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch

from tk_kernel_core.interpreter import interpreting
from tk_kernel_core.launch import DescriptorArgument, Kernel, KernelLaunch, TensorArgument
from tk_kernel_core.targets import Target

if TYPE_CHECKING:
    from triton import JITFunction


@dataclass(frozen=True, slots=True)
class CompiledObject:
    """The machine code of one launch.

    Attributes:
        target: What it was compiled for.
        kernel: Name of the kernel function.
        binary: The ELF object: a cubin or an hsaco.
        assembly: The text the binary was assembled from: PTX or AMD GCN assembly.
        num_warps: Warps (NVIDIA) or wavefronts (AMD) per program.
        shared_bytes: Shared memory (LDS) that one program is launched with, in bytes.
        launch: The launch that was compiled.
    """

    target: Target
    kernel: str
    binary: bytes
    assembly: str
    num_warps: int
    shared_bytes: int
    launch: KernelLaunch


def compile_launch(launch: KernelLaunch, target: Target) -> CompiledObject:
    """Compile the kernel of a launch for a target.

    Launches with the same `specialization_key` are compiled once per process, and once per machine as long as
    Triton's disk cache holds them.

    Args:
        launch: A launch, as `KernelSpec.launches` or `PreparedLaunch.describe` gives it. Its grid has no
            influence on the machine code.
        target: The architecture to compile for.

    Returns:
        The compiled kernel.

    Raises:
        TypeError: The launch does not name a `triton.jit` function.
        ValueError: The launch has an option that Triton's backend for the target does not know.
        RuntimeError: The Triton interpreter is on, the kernel does not compile, or it needs more shared memory
            than the target has.
    """
    key = specialization_key(launch, target)
    compiled = _compiled.get(key)
    if compiled is None:
        compiled = _compiled[key] = _compile(_specialize(launch, target))
    return replace(compiled, launch=launch)


def specialization_key(launch: KernelLaunch, target: Target) -> Hashable:
    """Return a key that two launches share when the same machine code serves both.

    Args:
        launch: Any launch.
        target: The architecture to compile for.

    Raises:
        TypeError, ValueError, RuntimeError: As `compile_launch`, except for what only compiling can tell.
    """
    return _specialize(launch, target).key


_compiled: dict[Hashable, CompiledObject] = {}


@dataclass(frozen=True, slots=True)
class _Specialization:
    """A launch as Triton's compiler takes it."""

    launch: KernelLaunch
    target: Target
    function: JITFunction
    signature: dict[str, str]
    constexprs: dict[tuple[int, ...], Any]
    attributes: dict[tuple[int, ...], Any]
    options: dict[str, Any]
    key: Hashable


class _StandInTensor:
    """What Triton's binder asks of a tensor, without the tensor."""

    def __init__(self, dtype: str, aligned: bool) -> None:
        self.dtype = getattr(torch, dtype)
        self._address = 0 if aligned else 1

    def data_ptr(self) -> int:
        return self._address

    def ptr_range(self) -> int:
        # The HIP backend uses 32-bit buffer offsets for tensors below 2 GiB. A launch does not say how large
        # its tensors are; below is what nearly all calls have.
        return 0


def _stand_in(value: Any) -> Any:
    """Return what the binder takes for an argument of a launch."""
    if isinstance(value, TensorArgument):
        return _StandInTensor(value.dtype, value.aligned)
    if isinstance(value, DescriptorArgument):
        from triton.tools.tensor_descriptor import TensorDescriptor

        # Shape and strides are known at run time only.
        strides = [*(16 for _ in value.block[1:]), 1]
        return TensorDescriptor(_StandInTensor(value.dtype, True), [1] * len(strides), strides, list(value.block))
    return value


def _jit_function(launch: KernelLaunch) -> JITFunction:
    if interpreting():
        raise RuntimeError(
            f"the kernel {launch.kernel} cannot be compiled ahead of time while TRITON_INTERPRET is set: that "
            f"replaces Triton's compiler by its interpreter; unset it and start a new process"
        )
    function = Kernel(launch.module, launch.kernel).function
    from triton import JITFunction

    if not isinstance(function, JITFunction):
        raise TypeError(f"{launch.module}.{launch.kernel} must be a triton.jit function, got {type(function).__name__}")
    return function


@functools.cache
def _binder(function: JITFunction, target: Target) -> tuple[Any, Any]:
    """Return the backend of a target and Triton's argument binder of a kernel for it."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    backend = make_backend(GPUTarget(target.backend, target.arch, target.warp_size))
    return backend, create_function_from_signature(function.signature, function.params, backend)


def _specialize(launch: KernelLaunch, target: Target) -> _Specialization:
    from triton import knobs
    from triton.runtime.jit import compute_cache_key

    function = _jit_function(launch)
    backend, bind = _binder(function, target)
    requested = {
        "debug": function.debug or knobs.runtime.debug,
        "instrumentation_mode": knobs.compilation.instrumentation_mode,
        **dict(launch.options),
    }
    known = backend.parse_options({}).__dict__
    unknown = [name for name in requested if name not in known]
    if unknown:
        raise ValueError(
            f"the kernel {launch.kernel} is launched for {target.name} with {', '.join(unknown)}, but Triton's "
            f"{target.backend} backend has no such option"
        )
    arguments = {name: _stand_in(value) for name, value in launch.arguments}
    bound, specialization, _ = bind(**arguments, **requested)
    options, signature, constexprs, attributes = function._pack_args(backend, requested, bound, specialization, None)
    return _Specialization(
        launch=launch,
        target=target,
        function=function,
        signature=signature,
        constexprs=constexprs,
        attributes=attributes,
        options=options.__dict__,
        key=(launch.module, launch.kernel, target, compute_cache_key({}, specialization, requested)),
    )


def _compile(specialization: _Specialization) -> CompiledObject:
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    launch, target = specialization.launch, specialization.target
    source = ASTSource(
        specialization.function, specialization.signature, specialization.constexprs, specialization.attributes
    )
    gpu = GPUTarget(target.backend, target.arch, target.warp_size)
    try:
        compiled = triton.compile(source, target=gpu, options=specialization.options)
    except Exception as error:
        raise RuntimeError(f"the kernel {launch.kernel} does not compile for {target.name}: {error}") from error
    if compiled.metadata.shared > target.shared_bytes:
        raise RuntimeError(
            f"the kernel {launch.kernel} needs {compiled.metadata.shared} bytes of shared memory, but {target.name} "
            f"has {target.shared_bytes} for one program"
        )
    is_cuda = target.backend == "cuda"
    return CompiledObject(
        target=target,
        kernel=launch.kernel,
        binary=compiled.asm["cubin" if is_cuda else "hsaco"],
        assembly=compiled.asm["ptx" if is_cuda else "amdgcn"],
        num_warps=compiled.metadata.num_warps,
        shared_bytes=compiled.metadata.shared,
        launch=launch,
    )

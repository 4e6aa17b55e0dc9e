"""torch.nn drop-ins."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any, Literal, TypeVar

import torch

from tk_int8_gemm._ops import int8_linear, w8a8_gemm
from tk_int8_gemm._packing import PackedInt8Weight
from tk_int8_gemm._quantize import (
    FLOATS,
    ZERO_POINTS,
    QuantScheme,
    channel_vector,
    dequantize,
    quantize_weight_per_channel,
    quantize_weight_per_channel_asymmetric,
)
from tk_kernel_core.checks import check_choice, check_shape, check_tensor
from tk_kernel_core.modules import check_linear, replace_linears

Scheme = Literal["symmetric", "asymmetric"]
Activations = Literal["16-bit", "int8"]
_ModuleT = TypeVar("_ModuleT", bound="_FrozenLinear")


class _FrozenLinear(torch.nn.Module):
    """A linear layer whose weight is int8 codes in buffers: how they are made, saved, loaded and converted."""

    # Names of the buffers. The codes are not persistent, because they are saved as (N, K) whatever their order here.
    _CODES = "codes"
    _SCALE = "scale"
    _ZERO_POINT = "zero_point"

    weight_int8: torch.Tensor
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool,
        scheme: Scheme,
        device: torch.device | str | None,
        dtype: torch.dtype | None,
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"in_features": in_features, "out_features": out_features}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, Integral):
                raise TypeError(f"{name} must be an int, got {type(size).__name__}")
            if size < 1:
                raise ValueError(f"{name} must be at least 1, got {size}")
        check_choice("scheme", scheme, ("symmetric", "asymmetric"))
        self.in_features, self.out_features = int(in_features), int(out_features)
        self.scheme: str = QuantScheme(scheme).value
        self.quantized = False
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )
        codes = torch.zeros(out_features, in_features, dtype=torch.int8, device=device)
        # What is saved before there is a weight shall not pass for one.
        scale = torch.full((out_features,), torch.nan, dtype=torch.float32, device=device)
        zero_point = torch.zeros(out_features, dtype=torch.float32, device=device)
        self.register_buffer(self._CODES, self._in_held_order(codes), persistent=False)
        self.register_buffer(self._SCALE, scale)
        self.register_buffer(self._ZERO_POINT, zero_point if scheme == "asymmetric" else None)

    def _in_held_order(self, codes: torch.Tensor) -> torch.Tensor:
        """Bring (N, K) codes into the order in which the buffer holds them."""
        return codes.contiguous()

    def quantize_weights(self, weight: torch.Tensor) -> None:
        """Take this weight, quantised to int8 with one scale per output channel.

        Args:
            weight: [out_features, in_features], floating point and finite. The buffers stay on their
                device; those of a module on the meta device move to that of the weight.

        Raises:
            TypeError: It is no tensor or of another dtype.
            ValueError: It has another shape, or elements that are not finite.
        """
        check_tensor("weight", weight, FLOATS)
        check_shape("weight", weight, (self.out_features, self.in_features))
        held: torch.Tensor = getattr(self, self._SCALE)
        weight = weight.detach().to(weight.device if held.is_meta else held.device)
        if self.scheme == "symmetric":
            codes, scale = quantize_weight_per_channel(weight)
        else:
            codes, scale, zero_point = quantize_weight_per_channel_asymmetric(weight)
            setattr(self, self._ZERO_POINT, zero_point.float())
        setattr(self, self._SCALE, scale)
        setattr(self, self._CODES, self._in_held_order(codes))
        self.quantized = not weight.is_meta

    @classmethod
    def _from_linear(cls: type[_ModuleT], linear: torch.nn.Linear, **options: Any) -> _ModuleT:
        check_linear(linear, FLOATS)
        out_features, in_features = linear.weight.shape
        # On the meta device, so that nothing is made that would be replaced at once.
        module = cls(in_features, out_features, device="meta", **options)
        module.bias = linear.bias
        module.quantize_weights(linear.weight)
        return module.train(linear.training)

    def _check_quantized(self) -> None:
        if not self.quantized:
            raise RuntimeError(
                f"this {type(self).__name__} has no weight yet: call quantize_weights, load a state dict, or set "
                "quantized to True after filling its buffers"
            )

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self._buffers[name]
            # A conversion of the model is one of its parameters: scales in 16 bits would be other scales.
            if buffer is not None and now is not None and now.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(now.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight_int8"] = self.weight_int8
        super()._save_to_state_dict(destination, prefix, keep_vars)

    def _load_from_state_dict(
        self,
        state_dict: Any,
        prefix: str,
        local_metadata: Any,
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        state = dict(state_dict)
        codes = state.pop(f"{prefix}weight_int8", None)
        try:
            if codes is not None:
                check_tensor("weight_int8", codes, (torch.int8,))
                check_shape("weight_int8", codes, (self.out_features, self.in_features))
            for name, dtypes in ((self._SCALE, FLOATS), (self._ZERO_POINT, ZERO_POINTS)):
                if (key := prefix + name) in state:
                    state[key] = channel_vector(name, state[key], self.out_features, dtypes)
        except (TypeError, ValueError) as error:
            error_msgs.append(f"{prefix}{error}")
            return
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if codes is not None:
            held: torch.Tensor = getattr(self, self._CODES)
            if local_metadata.get("assign_to_params_buffers", False):
                setattr(self, self._CODES, self._in_held_order(codes))
            else:
                held.copy_(self._in_held_order(codes.to(held.device)))
            self.quantized = not getattr(self, self._CODES).is_meta
        elif strict:
            missing_keys.append(f"{prefix}weight_int8")

    def extra_repr(self) -> str:
        """Return the sizes, whether there is a bias, and the scheme."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"scheme={self.scheme!r}"
        )


class Int8Linear(_FrozenLinear):
    """A linear layer with a frozen int8 weight: what torch.nn.Linear takes, in half the memory of 16 bits.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
        bias: Whether there is a bias.
        scheme: `symmetric`, or `asymmetric` for a zero point per output channel.
        activations: `16-bit` for `int8_linear`, which leaves activations as they are; `int8` for `w8a8_gemm`,
            which quantises them per token.
        device: Where the buffers and the bias are made.
        dtype: Dtype of the bias. Codes, scales and zero points have their own, which no conversion of the module
            changes.

    Attributes:
        weight_int8: The codes, [out_features, in_features] int8. With 16-bit activations this is a copy, made anew.
        codes: Buffer that holds them: as they are for int8 activations, in the order of `PackedInt8Weight` for 16-bit.
        scale: Buffer [out_features] float32.
        zero_point: Buffer [out_features] float32, or None. Quantising gives whole numbers from -128 to 127.
        bias: Parameter [out_features], or None.
        quantized: Whether there is a weight; without one `forward` raises.

    The state dict holds `weight_int8`, `scale`, `zero_point` and `bias`, whatever the order in memory, so that it
    loads into a module with other activations. There scales and zero points may have the shapes (), (1,), (N,), (N, 1)
    and (1, N), and other dtypes.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        scheme: Scheme = "symmetric",
        activations: Activations = "16-bit",
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        # Set first, because the order of the codes depends on it.
        self.activations: Activations = check_choice("activations", activations, ("16-bit", "int8"))
        super().__init__(in_features, out_features, bias, scheme, device, dtype)

    @classmethod
    def from_linear(
        cls, linear: torch.nn.Linear, *, scheme: Scheme = "symmetric", activations: Activations = "16-bit"
    ) -> Int8Linear:
        """Make the int8 equivalent of a linear layer; the bias is shared, not copied.

        Args:
            linear: The layer, with a finite weight.
            scheme: As for the class.
            activations: As for the class.

        Returns:
            A module on the same device, in the same training mode.

        Raises:
            TypeError: It is no torch.nn.Linear.
            ValueError: Its weight cannot be quantised, its bias is float64, or it has something that would be lost:
                a forward of its own, hooks, further parameters or buffers.
        """
        module = cls._from_linear(linear, scheme=scheme, activations=activations)
        if linear.bias is not None and linear.bias.dtype == torch.float64:
            raise ValueError("linear.bias must have dtype float16, bfloat16 or float32, got float64")
        return module

    def _in_held_order(self, codes: torch.Tensor) -> torch.Tensor:
        if self.activations == "int8":
            return super()._in_held_order(codes)
        return PackedInt8Weight.pack(codes, torch.ones((), device=codes.device)).codes

    def _packed(self) -> PackedInt8Weight:
        # Not by attributes, which take a module longer than all else that happens here.
        held: Any = self._buffers
        return PackedInt8Weight(held["codes"], held["scale"], held["zero_point"], self.out_features, self.in_features)

    @property
    def weight_int8(self) -> torch.Tensor:  # type: ignore[override]
        """The codes, [out_features, in_features] int8."""
        return self.codes if self.activations == "int8" else self._packed().unpack()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: [..., in_features], float16, bfloat16 or float32, any strides.

        Returns:
            A new contiguous tensor [..., out_features] with the dtype of `x`. It has gradients for `x` and the
            bias.

        Raises:
            RuntimeError: There is no weight yet.
            TypeError: As for `int8_linear`, or `w8a8_gemm` with int8 activations.
            ValueError: Likewise.
        """
        self._check_quantized()
        if self.activations == "int8":
            held: Any = self._buffers
            return w8a8_gemm(x, held["codes"], held["scale"], self.bias, zero_point=held["zero_point"])
        return int8_linear(x, self._packed(), self.bias)

    def extra_repr(self) -> str:
        """Return the arguments of the class but device and dtype."""
        return f"{super().extra_repr()}, activations={self.activations!r}"


class QuantizedLinear(_FrozenLinear):
    """The reference of `Int8Linear`: dequantises its weight to the dtype of the input, and calls PyTorch.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
        bias: Whether there is a bias.
        scheme: `symmetric`, or `asymmetric` for a zero point per output channel.
        device: Where the buffers and the bias are made.
        dtype: Dtype of the bias.

    Attributes:
        weight_int8: Buffer [out_features, in_features] int8.
        weight_scale: Buffer [out_features] float32.
        weight_zero_point: Buffer [out_features] float32, or None.
        bias: Parameter [out_features], or None.
        quantized: Whether there is a weight; without one `forward` raises.
    """

    _CODES = "weight_int8"
    _SCALE = "weight_scale"
    _ZERO_POINT = "weight_zero_point"

    weight_scale: torch.Tensor
    weight_zero_point: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        scheme: Scheme = "symmetric",
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__(in_features, out_features, bias, scheme, device, dtype)

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, scheme: Scheme = "symmetric") -> QuantizedLinear:
        """Make the int8 equivalent of a linear layer, as `Int8Linear.from_linear` does, with the same errors."""
        return cls._from_linear(linear, scheme=scheme)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer to [..., in_features]; RuntimeError if there is no weight yet."""
        self._check_quantized()
        weight = dequantize(self.weight_int8, self.weight_scale, x.dtype, 0, self.weight_zero_point)
        return torch.nn.functional.linear(x, weight, self.bias)


def replace_linear(
    model: torch.nn.Module,
    *,
    skip: Sequence[str] = ("lm_head",),
    scheme: Scheme = "symmetric",
    activations: Activations = "16-bit",
) -> list[str]:
    """Replace every linear layer inside a model by `Int8Linear`, in place.

    Layers that cannot be replaced without loss stay, with a warning that says why: those with a weight that
    another module has too, such as an output layer tied to the embedding, with a forward of their own, with hooks,
    or with a weight that is not finite. Modules that read the weight of a child, instead of calling it, have to be
    skipped. The old weights are let go of at the end, so that for a while one and a half times their memory is used.

    Args:
        model: Any model. It must not itself be a linear layer: use `Int8Linear.from_linear` for that.
        skip: Modules that stay as they are, with all inside them. Each is the end of a dotted name, or a pattern
            of fnmatch for one: `lm_head` skips `model.lm_head`, and `layers.0.*` all inside the first layer. A
            module with several names stays if one of them is skipped.
        scheme: As for `Int8Linear`.
        activations: As for `Int8Linear`.

    Returns:
        Names of the replaced modules.

    Raises:
        TypeError: `model` is no module, or `skip` is a single string.
        ValueError: `model` is itself a linear layer, or there is no such scheme or mode of activations.
    """
    check_choice("scheme", scheme, ("symmetric", "asymmetric"))
    check_choice("activations", activations, ("16-bit", "int8"))
    return replace_linears(
        model, skip, lambda linear: Int8Linear.from_linear(linear, scheme=scheme, activations=activations)
    )

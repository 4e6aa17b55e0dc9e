"""torch.nn drop-ins."""

from __future__ import annotations

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch

from tk_kernel_core.checks import ACTIVATION_DTYPES, check_choice, check_same_device, check_shape, check_tensor
from tk_kernel_core.modules import check_linear, replace_linears
from tk_w4a16._ops import w4a16_linear
from tk_w4a16._packing import GROUP_SIZES, PackedInt4Weight
from tk_w4a16._state import STATE_NAMES, blank_weight, load_weight, save_weight

_BUFFERS = ("codes", "scales", "zeros", "permutation")


class W4A16Linear(torch.nn.Module):
    """A linear layer with a frozen 4-bit weight: what torch.nn.Linear takes, in a quarter of the memory of 16 bits.

    Args:
        in_features: Size of the last dimension of the input.
        out_features: Size of the last dimension of the result.
        bias: Whether there is a bias.
        group_size: Input features that share a scale: 32, 64, 128 or 256; -1, or any from in_features, for all.
        symmetric: Whether every zero point is 8, and none is held.
        act_order: Whether input features have groups in any order: GPTQ's `desc_act`.
        device: Where the buffers and the bias are made.
        dtype: Dtype of the scales, until there is a weight with others, and of the bias. No conversion of the module
            changes that of scales.

    Attributes:
        codes: Buffer, as in `PackedInt4Weight`; so are the others.
        scales: Buffer.
        zeros: Buffer, or None.
        permutation: Buffer, or None.
        packed: The buffers, as a `PackedInt4Weight`.
        bias: Parameter [out_features], or None.
        quantized: Whether there is a weight; without one `forward` raises.

    The state dict does not depend on the order in which the buffers hold the weight. G is the number of groups:

    - `weight_packed`: int32 [out_features, ceil(in_features / 8)], eight consecutive input features in a word, lowest
      bits first.
    - `weight_scale`: [out_features, G], of the dtype of the scales.
    - `weight_zero_point`: uint8 [out_features, G], within [0, 16]; not of symmetric layers.
    - `weight_g_idx`: int32 [in_features], the group of each input feature; of layers with `act_order` only.
    - `bias`, if there is one.
    """

    codes: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor | None
    permutation: torch.Tensor | None
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        group_size: int = 128,
        symmetric: bool = False,
        act_order: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        sizes: dict[str, Any] = {"in_features": in_features, "out_features": out_features, "group_size": group_size}
        for name, size in sizes.items():
            if isinstance(size, bool) or not isinstance(size, Integral):
                raise TypeError(f"{name} must be an int, got {type(size).__name__}")
            if size < 1 and not (name == "group_size" and size == -1):
                raise ValueError(f"{name} must be at least 1, got {size}")
        dtype = torch.get_default_dtype() if dtype is None else dtype
        check_choice("dtype", dtype, ACTIVATION_DTYPES)
        self.in_features, self.out_features = int(in_features), int(out_features)
        self.symmetric, self.act_order, self.quantized = symmetric, act_order, False
        self.register_parameter(
            "bias", torch.nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        )
        self._hold(
            blank_weight(self.in_features, self.out_features, int(group_size), symmetric, act_order, dtype, device)
        )

    def _hold(self, weight: PackedInt4Weight) -> None:
        # The group size is that of the layout, which a group index may have made smaller.
        self.group_size = weight.group_size
        for name in _BUFFERS:
            self.register_buffer(name, getattr(weight, name), persistent=False)

    @property
    def packed(self) -> PackedInt4Weight:
        """The weight, in the memory of the buffers."""
        # Not by attributes, which take a module longer than all else that happens in a call.
        held: Any = self._buffers
        tensors = held["codes"], held["scales"], held["zeros"], held["permutation"]
        return PackedInt4Weight(*tensors, self.group_size, self.out_features, self.in_features)

    def quantize_weights(self, weight: torch.Tensor) -> None:
        """Take this weight, quantised to nearest by the rule of `quantize_weight_int4_grouped`.

        Args:
            weight: [out_features, in_features], fp16, bf16 or fp32, finite; the scales get its dtype. The buffers stay
                on their device; those of a module on the meta device move to that of the weight.

        Raises:
            TypeError: It is no tensor or of another dtype.
            ValueError: It has another shape, or elements that are not finite; or the module has `act_order`.
        """
        check_tensor("weight", weight)
        check_shape("weight", weight, (self.out_features, self.in_features))
        if self.act_order:
            raise ValueError("act_order must be False for weights that are rounded to nearest, got True")
        weight = weight.detach().to(weight.device if self.codes.is_meta else self.codes.device)
        self._hold(PackedInt4Weight.from_float(weight, self.group_size, symmetric=self.symmetric))
        self.quantized = not weight.is_meta

    @classmethod
    def from_packed(
        cls, weight: PackedInt4Weight, bias: torch.Tensor | None = None, *, act_order: bool = False
    ) -> W4A16Linear:
        """Make a layer of a prepared weight, whose tensors become its buffers.

        Args:
            weight: The weight.
            bias: fp16, bf16 or fp32, [out_features], on the device of the weight; a parameter is shared, not copied.
            act_order: As for the class. A weight with a permutation has it in any case.

        Raises:
            TypeError: An argument is of another type, or the bias of another dtype.
            ValueError: The bias has another shape or device.
        """
        if not isinstance(weight, PackedInt4Weight):
            raise TypeError(f"weight must be a PackedInt4Weight, got {type(weight).__name__}")
        if bias is not None:
            check_shape("bias", check_tensor("bias", bias), (weight.out_features,))
            check_same_device("bias", bias, weight.codes.device, "weight")
        # On the meta device, so that nothing is made that would be replaced at once.
        module = cls(
            weight.in_features,
            weight.out_features,
            group_size=weight.group_size,
            symmetric=weight.zeros is None,
            act_order=act_order or weight.permutation is not None,
            device="meta",
            dtype=weight.scales.dtype,
        )
        module.bias = bias if bias is None or isinstance(bias, torch.nn.Parameter) else torch.nn.Parameter(bias)
        module._hold(weight)
        module.quantized = not weight.codes.is_meta
        return module

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, *, group_size: int = 128, symmetric: bool = False) -> W4A16Linear:
        """Make the 4-bit equivalent of a linear layer, rounded to nearest; the bias is shared, not copied.

        Args:
            linear: The layer, with a finite weight; weight and bias of 16 or 32 bits.
            group_size: As for the class.
            symmetric: As for the class.

        Returns:
            A module on the same device, in the same training mode.

        Raises:
            TypeError: It is no torch.nn.Linear, or the group size is no integer.
            ValueError: Its weight cannot be quantised, or it has something that would be lost: a forward of its
                own, hooks, further parameters or buffers.
        """
        check_linear(linear, ACTIVATION_DTYPES)
        module = cls.from_float(linear.weight, linear.bias, group_size=group_size, symmetric=symmetric)
        return module.train(linear.training)

    @classmethod
    def from_float(
        cls, weight: torch.Tensor, bias: torch.Tensor | None = None, *, group_size: int = 128, symmetric: bool = False
    ) -> W4A16Linear:
        """Quantise a weight to nearest, as `PackedInt4Weight.from_float` does, with the same errors.

        Args:
            weight: fp16, bf16 or fp32, [out_features, in_features].
            bias: As for `from_packed`, and for all that follow.
            group_size: As for the class.
            symmetric: As for the class.
        """
        return cls.from_packed(PackedInt4Weight.from_float(weight, group_size, symmetric=symmetric), bias)

    @classmethod
    def from_gptq(
        cls,
        qweight: torch.Tensor,
        qzeros: torch.Tensor | None,
        scales: torch.Tensor,
        g_idx: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        **config: Any,
    ) -> W4A16Linear:
        """Make a layer of the tensors of a GPTQ checkpoint, as `PackedInt4Weight.from_gptq` does, with the same errors.

        Args:
            qweight: As there.
            qzeros: As there.
            scales: As there.
            g_idx: As there. With one the module has `act_order`, in whatever order it is.
            bias: As for `from_packed`.
            config: `group_size`, `checkpoint_format`, `symmetric`, `desc_act` and `bits`, as there.
        """
        weight = PackedInt4Weight.from_gptq(qweight, qzeros, scales, g_idx, **config)
        return cls.from_packed(weight, bias, act_order=g_idx is not None)

    @classmethod
    def from_awq(
        cls,
        qweight: torch.Tensor,
        qzeros: torch.Tensor,
        scales: torch.Tensor,
        bias: torch.Tensor | None = None,
        **config: Any,
    ) -> W4A16Linear:
        """Make a layer of the tensors of an AWQ checkpoint, as `PackedInt4Weight.from_awq` does, with the same errors.

        Args:
            qweight: As there.
            qzeros: As there.
            scales: As there.
            bias: As for `from_packed`.
            config: `group_size`, `version` and `bits`, as there.
        """
        return cls.from_packed(PackedInt4Weight.from_awq(qweight, qzeros, scales, **config), bias)

    @classmethod
    def from_compressed_tensors(
        cls,
        weight_packed: torch.Tensor,
        weight_scale: torch.Tensor,
        weight_shape: torch.Tensor | Sequence[int],
        weight_zero_point: torch.Tensor | None = None,
        weight_g_idx: torch.Tensor | None = None,
        bias: torch.Tensor | None = None,
        **config: Any,
    ) -> W4A16Linear:
        """Make a layer of the tensors of a `pack-quantized` checkpoint, as `PackedInt4Weight.from_compressed_tensors`.

        Args:
            weight_packed: As there, which raises the same errors.
            weight_scale: As there.
            weight_shape: As there.
            weight_zero_point: As there.
            weight_g_idx: As there. With one the module has `act_order`, in whatever order it is.
            bias: As for `from_packed`.
            config: `group_size`, `symmetric` and `bits`, as there.
        """
        tensors = weight_packed, weight_scale, weight_shape, weight_zero_point, weight_g_idx
        weight = PackedInt4Weight.from_compressed_tensors(*tensors, **config)
        return cls.from_packed(weight, bias, act_order=weight_g_idx is not None)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Apply the layer.

        Args:
            x: [..., in_features], float16, bfloat16 or float32, any strides.

        Returns:
            A new contiguous tensor [..., out_features] with the dtype of `x`. It has gradients for `x` and the
            bias.

        Raises:
            RuntimeError: There is no weight yet.
            TypeError: As for `w4a16_linear`.
            ValueError: Likewise.
        """
        if not self.quantized:
            raise RuntimeError(
                f"this {type(self).__name__} has no weight yet: call quantize_weights, load a state dict, or set "
                "quantized to True after filling its buffers"
            )
        return w4a16_linear(x, self.packed, self.bias)

    def _apply(self, fn: Any, recurse: bool = True) -> Any:
        before = dict(self._buffers)
        super()._apply(fn, recurse)  # type: ignore[no-untyped-call]
        for name, buffer in before.items():
            now = self._buffers[name]
            # A conversion of the model is one of its parameters: scales of another dtype would be other scales.
            if buffer is not None and now is not None and now.dtype != buffer.dtype:
                self._buffers[name] = buffer.to(now.device)
        return self

    def _save_to_state_dict(self, destination: Any, prefix: str, keep_vars: bool) -> None:
        for name, value in save_weight(self.packed, self.act_order).items():
            destination[prefix + name] = value
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
        absent = {"weight_zero_point": self.symmetric, "weight_g_idx": not self.act_order}
        wanted = [name for name in STATE_NAMES if not absent.get(name)]
        state = dict(state_dict)
        given = {name: state.pop(prefix + name) for name in wanted if prefix + name in state}
        assign = local_metadata.get("assign_to_params_buffers", False)
        if len(given) == len(wanted):
            try:
                device = None if assign or self.codes.is_meta else self.codes.device
                weight = load_weight(given, self.in_features, self.out_features, self.group_size, device)
            except (TypeError, ValueError) as error:
                error_msgs.append(f"{prefix}{error}")
                return
        super()._load_from_state_dict(state, prefix, local_metadata, strict, missing_keys, unexpected_keys, error_msgs)
        if len(given) < len(wanted):
            # A part of a weight is none: nothing of it is loaded.
            missing_keys.extend(prefix + name for name in wanted if name not in given and strict)
        elif assign or not self.codes.is_meta:
            self._take(weight, assign)

    def _take(self, weight: PackedInt4Weight, assign: bool) -> None:
        """Take a weight that was loaded: into the memory of the buffers, unless told otherwise or it does not fit."""
        held, new = [tuple(getattr(side, name) for name in _BUFFERS) for side in (self, weight)]
        fits = self.group_size == weight.group_size and all(
            (ours is None) == (theirs is None)
            and (ours is None or (ours.shape, ours.dtype) == (theirs.shape, theirs.dtype))
            for ours, theirs in zip(held, new, strict=True)
        )
        if fits and not assign:
            for ours, theirs in zip(held, new, strict=True):
                if ours is not None:
                    ours.copy_(theirs)
        else:
            self._hold(weight)
        self.quantized = not self.codes.is_meta

    def extra_repr(self) -> str:
        """Return the arguments of the class but device and dtype."""
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"group_size={self.group_size}, symmetric={self.symmetric}, act_order={self.act_order}"
        )


def replace_linear(
    model: torch.nn.Module,
    *,
    skip: Sequence[str] = ("lm_head",),
    group_size: int = 128,
    symmetric: bool = False,
) -> list[str]:
    """Replace every linear layer inside a model by `W4A16Linear`, its weight rounded to nearest, in place.

    Layers that cannot be replaced without loss stay, with a warning that says why: those with a weight that
    another module has too, such as an output layer tied to the embedding, with a forward of their own, with hooks,
    or with a weight that is not finite. Modules that read the weight of a child, instead of calling it, have to be
    skipped. The old weights are let go of at the end, so that for a while one and a quarter of their memory is used.

    Args:
        model: Any model. It must not itself be a linear layer: use `W4A16Linear.from_linear` for that.
        skip: Modules that stay as they are, with all inside them. Each is the end of a dotted name, or a pattern
            of fnmatch for one: `lm_head` skips `model.lm_head`, and `layers.0.*` all inside the first layer. A
            module with several names stays if one of them is skipped.
        group_size: 32, 64, 128 or 256; -1 for one group.
        symmetric: As for `W4A16Linear`.

    Returns:
        Names of the replaced modules.

    Raises:
        TypeError: `model` is no module, or `skip` is a single string.
        ValueError: `model` is itself a linear layer, or there is no such group size.
    """
    check_choice("group_size", group_size, (*GROUP_SIZES, -1))
    return replace_linears(
        model, skip, lambda linear: W4A16Linear.from_linear(linear, group_size=group_size, symmetric=symmetric)
    )

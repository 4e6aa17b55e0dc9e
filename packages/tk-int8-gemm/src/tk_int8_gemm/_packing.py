"""Int8 weights in the order in which the matrix units' operand registers hold them.

A multiplication of few rows takes as long as reading its weight does. Laid out like this, 16 consecutive bytes
are what one thread feeds to two instructions: a warp reads 512 consecutive bytes at once, and no weight passes
through shared memory. One packed weight serves every kernel, tuning and number of rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from tk_int8_gemm._quantize import FLOATS, ZERO_POINTS, channel_vector
from tk_kernel_core.checks import check_same_device, check_tensor
from tk_kernel_core.packing import int8_codes, int8_words


@dataclass(frozen=True, eq=False, repr=False)
class PackedInt8Weight:
    """An int8 weight prepared for `int8_linear`, made by `pack`.

    Attributes:
        codes: int32, [N / 16, K / 64, 2, 32, 4] with N and K padded, contiguous. Word `2 * b + a` of lane
            `4 * r + c` in half h of block [t, s] holds the codes of row `16 * t + 8 * b + r` and columns
            `64 * s + 32 * h + 8 * c + 4 * a` to 3 further, lowest byte first, each plus 128.
        scale: float32, [out_features].
        zero_point: float32, [out_features], or None where the scheme is symmetric.
        out_features: N, rows of the weight.
        in_features: K, columns of the weight.
    """

    codes: torch.Tensor
    scale: torch.Tensor
    zero_point: torch.Tensor | None
    out_features: int
    in_features: int

    @classmethod
    def pack(
        cls, weight_int8: torch.Tensor, scale: torch.Tensor, zero_point: torch.Tensor | None = None
    ) -> PackedInt8Weight:
        """Prepare a weight: once, when a model is loaded.

        Args:
            weight_int8: int8 codes, [N, K] with N and K at least 1, any strides.
            scale: Floating point, rounded to float32; one for all rows as () or (1,), or one for each as [N], [N, 1]
                or [1, N].
            zero_point: int8, int32 or floating point; shaped like a scale; None for a symmetric scheme.

        Returns:
            The weight `(weight_int8 - zero_point) * scale`, on the device of `weight_int8`.

        Raises:
            TypeError: An argument is no dense tensor of these dtypes.
            ValueError: A shape is another, the weight is empty, or the devices differ.
        """
        check_tensor("weight_int8", weight_int8, (torch.int8,))
        if weight_int8.dim() != 2 or weight_int8.numel() == 0:
            raise ValueError(
                f"weight_int8 must have shape (out_features, in_features), both at least 1, got "
                f"{tuple(weight_int8.shape)}"
            )
        n, k = weight_int8.shape
        return cls(
            # What is padded with code 0 adds nothing to any result.
            codes=int8_words(weight_int8),
            scale=_per_row("scale", scale, FLOATS, weight_int8),
            zero_point=(None if zero_point is None else _per_row("zero_point", zero_point, ZERO_POINTS, weight_int8)),
            out_features=n,
            in_features=k,
        )

    def unpack(self) -> torch.Tensor:
        """Return the int8 codes, [out_features, in_features], exactly as they were packed."""
        return int8_codes(self.codes)[: self.out_features, : self.in_features].contiguous()

    def to(self, device: torch.device | str | int) -> PackedInt8Weight:
        """Return the weight on another device, or the same one where it is there already."""
        zero_point = None if self.zero_point is None else self.zero_point.to(device)
        codes, scale = self.codes.to(device), self.scale.to(device)
        if codes is self.codes and scale is self.scale and zero_point is self.zero_point:
            return self
        return replace(self, codes=codes, scale=scale, zero_point=zero_point)

    def __repr__(self) -> str:
        scheme = "symmetric" if self.zero_point is None else "asymmetric"
        return (
            f"PackedInt8Weight(out_features={self.out_features}, in_features={self.in_features}, {scheme}, "
            f"device={self.codes.device})"
        )


def _per_row(name: str, value: torch.Tensor, dtypes: tuple[torch.dtype, ...], weight: torch.Tensor) -> torch.Tensor:
    """Bring a scale or zero point to float32 and [N]."""
    vector = channel_vector(name, value, weight.shape[0], dtypes)
    check_same_device(name, value, weight.device, "weight_int8")
    return vector

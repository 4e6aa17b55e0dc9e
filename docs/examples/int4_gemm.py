"""A product with 4-bit weights: its error, and the memory that it saves.

    python docs/examples/int4_gemm.py

Needs tk-w4a16. Without a GPU the PyTorch reference computes.
"""

from __future__ import annotations

import torch

from tk_w4a16 import dequantize_int4, quantize_weight_int4_grouped, w4a16_gemm

TOKENS, IN_FEATURES, OUT_FEATURES = 16, 2048, 1024


def bytes_of(*tensors: torch.Tensor) -> int:
    """Return how many bytes tensors take."""
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors)


def error(got: torch.Tensor, exact: torch.Tensor) -> float:
    """Return the length of the difference over the length of the exact result."""
    return float((got - exact).norm() / exact.norm())


def main() -> None:
    """Round a weight to 4 bits in groups of several sizes, multiply by it, and print errors and bytes."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    x = torch.randn(TOKENS, IN_FEATURES, device=device).half()
    weight = (torch.randn(IN_FEATURES, OUT_FEATURES, device=device) * IN_FEATURES**-0.5).half()
    exact = x.double() @ weight.double()
    print(f"{TOKENS} rows times a weight of {IN_FEATURES} x {OUT_FEATURES}, on {device}\n")

    print(f"{'weight':<22} {'bytes':>10} {'saved':>7} {'error':>9} {'without that of the weight':>27}")
    product = error(x @ weight, exact)
    print(f"{'float16':<22} {bytes_of(weight):>10,} {0:>7.1%} {product:>9.3%} {product:>27.3%}")
    for group_size in (256, 128, 32):
        # Eight codes in each int32; a scale and a zero point for each group of input features.
        packed, scales, zeros = quantize_weight_int4_grouped(weight, group_size)
        y = w4a16_gemm(x, packed, scales, zeros, group_size)
        rounded = x.double() @ dequantize_int4(packed, scales, zeros, group_size).double()
        size = bytes_of(packed, scales, zeros)
        print(
            f"{f'4 bits, groups of {group_size}':<22} {size:>10,} {1 - size / bytes_of(weight):>7.1%} "
            f"{error(y, exact):>9.3%} {error(y, rounded):>27.3%}"
        )


if __name__ == "__main__":
    main()

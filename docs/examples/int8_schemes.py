"""Int8 weights, symmetric against asymmetric: what each loses of a centred weight, and of one that is not.

    python docs/examples/int8_schemes.py

Needs tk-int8-gemm, and no GPU.
"""

from __future__ import annotations

import torch

from tk_int8_gemm import Int8Linear, calculate_quantization_error, quantize_asymmetric, quantize_symmetric


def main() -> None:
    """Quantise two weights by both schemes, and print the errors of the weights and of a layer that uses them."""
    torch.manual_seed(0)
    normal = torch.randn(512, 1024) * 0.02
    weights = {
        "centred: normal": normal,
        # All of one sign: half of the symmetric codes are never used.
        "skewed: absolute values": normal.abs(),
    }
    x = torch.randn(64, 1024)

    print(f"{'weight':<24} {'scheme':<11} {'largest error':>13} {'signal to noise':>15} {'error of a layer':>17}")
    for name, weight in weights.items():
        linear = torch.nn.Linear(1024, 512, bias=False)
        linear.weight = torch.nn.Parameter(weight, requires_grad=False)
        exact = x @ weight.T
        ratios = {}
        for scheme in ("symmetric", "asymmetric"):
            # One scale, and here one zero point, for each row: an output feature.
            if scheme == "symmetric":
                (codes, scale), zero_point = quantize_symmetric(weight, dim=1), None
            else:
                codes, scale, zero_point = quantize_asymmetric(weight, dim=1)
            errors = calculate_quantization_error(weight, codes, scale, zero_point=zero_point)
            layer = Int8Linear.from_linear(linear, scheme=scheme)
            relative = ((layer(x) - exact).norm() / exact.norm()).item()
            ratios[scheme] = errors["snr_db"]
            print(
                f"{name:<24} {scheme:<11} {errors['max_abs_error']:>13.2e} "
                f"{errors['snr_db']:>12.1f} dB {100 * relative:>15.3f} %"
            )
        print(f"{name:<24} asymmetric gains {ratios['asymmetric'] - ratios['symmetric']:.1f} dB\n")


if __name__ == "__main__":
    main()

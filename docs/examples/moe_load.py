"""A mixture-of-experts layer: how many tokens each expert serves, and that the layer is the sum over its experts.

    python docs/examples/moe_load.py

Needs tk-moe-dispatch. Without a GPU the PyTorch reference computes.
"""

from __future__ import annotations

import torch

from tk_moe_dispatch import fused_moe_forward

TOKENS, HIDDEN, FFN, EXPERTS, TOP_K = 512, 256, 512, 8, 2


def main() -> None:
    """Send tokens through a layer, print each expert's load, and compare with a loop over experts."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    dtype = torch.bfloat16
    x = torch.randn(TOKENS, HIDDEN, device=device, dtype=dtype)
    router = torch.randn(EXPERTS, HIDDEN, device=device, dtype=dtype) * HIDDEN**-0.5
    gate, up = (torch.randn(EXPERTS, FFN, HIDDEN, device=device, dtype=dtype) * HIDDEN**-0.5 for _ in range(2))
    down = torch.randn(EXPERTS, HIDDEN, FFN, device=device, dtype=dtype) * FFN**-0.5

    y, experts, weights = fused_moe_forward(x, router, gate, up, down, EXPERTS, TOP_K)

    load = torch.bincount(experts.flatten(), minlength=EXPERTS).tolist()
    mean = TOKENS * TOP_K / EXPERTS
    print(f"{TOKENS} tokens, {TOP_K} of {EXPERTS} experts each, on {device}\n")
    for expert, tokens in enumerate(load):
        print(
            f"expert {expert}  {tokens:>4} tokens  {tokens / mean:>5.2f} of the mean  {'#' * round(20 * tokens / mean)}"
        )
    print(f"all      {sum(load):>5} tokens, the fullest expert {max(load) / mean:.2f} times the mean\n")

    expected = torch.zeros(TOKENS, HIDDEN, device=device, dtype=torch.float64)
    for expert in range(EXPERTS):
        token, slot = (experts == expert).nonzero(as_tuple=True)
        rows = x[token].double()
        hidden = torch.nn.functional.silu(rows @ gate[expert].double().T) * (rows @ up[expert].double().T)
        expected.index_add_(0, token, weights[token, slot, None].double() * (hidden @ down[expert].double().T))
    error = (y - expected).abs().max().item()
    print(
        f"largest difference from a loop over experts in fp64: {error:.1e}, of values up to {expected.abs().max():.2f}"
    )


if __name__ == "__main__":
    main()

"""A model of Llama-3-8B's size, and a layer of Mixtral's, moved onto these packages step by step.

    python docs/examples/llama_decode.py --json llama_decode.json

Builds transformers models with random weights, nothing is downloaded, and replaces their modules in four steps:
norms and activation; those and int8 weights; those and 4-bit weights; norms and mixture of experts. Each is timed at
prefill and decode, beside the model as it was, eager and under torch.compile. All of them run as CUDA graphs over a
static cache, are fed the same tokens, and their logits are held against those of the eager model.

Needs transformers, tk-rmsnorm, tk-swiglu, tk-int8-gemm, tk-w4a16 and tk-moe-dispatch. Without a GPU a small model
shows that it works, by the PyTorch references: its times say nothing about a GPU.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import inspect
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
import transformers

import tk_int8_gemm
import tk_w4a16
from tk_kernel_core.device import current_device
from tk_kernel_core.timing import bytes_in
from tk_moe_dispatch import replace_moe
from tk_rmsnorm import replace_rmsnorm
from tk_swiglu import replace_swiglu

PACKAGES = ("tk-kernel-core", "tk-rmsnorm", "tk-swiglu", "tk-int8-gemm", "tk-w4a16", "tk-moe-dispatch")
EAGER, COMPILED = "eager", "torch.compile"
ORIGINAL = "as it was"

LLAMA_8B = {
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128_256,
    "rope_parameters": {"rope_type": "default", "rope_theta": 500_000.0},
}
MIXTRAL_LAYER = {
    **LLAMA_8B,
    "num_hidden_layers": 1,
    "vocab_size": 32_000,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1_000_000.0},
}
SMALL = {
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}
MODELS: dict[str, dict[str, dict[str, Any]]] = {
    "8b": {"llama": LLAMA_8B, "mixtral": MIXTRAL_LAYER},
    "small": {
        "llama": {**LLAMA_8B, **SMALL, "num_hidden_layers": 2},
        "mixtral": {**MIXTRAL_LAYER, **SMALL},
    },
}
CONFIGS = {"llama": transformers.LlamaConfig, "mixtral": transformers.MixtralConfig}
# Tokens of the prompt, tokens to decode, samples of each time.
LENGTHS = {"8b": (512, 64, 5), "small": (16, 4, 1)}


def replace_norm_and_activation(model: torch.nn.Module) -> list[str]:
    """Replace every RMSNorm and every gated MLP with SiLU."""
    return replace_rmsnorm(model) + replace_swiglu(model)


def replace_with_int8(model: torch.nn.Module) -> list[str]:
    """Replace those, and round the weights of linear layers to 8 bits."""
    return replace_norm_and_activation(model) + tk_int8_gemm.replace_linear(model)


def replace_with_int4(model: torch.nn.Module) -> list[str]:
    """Replace those, and round the weights of linear layers to 4 bits."""
    return replace_norm_and_activation(model) + tk_w4a16.replace_linear(model)


def replace_norm_and_experts(model: torch.nn.Module) -> list[str]:
    """Replace every RMSNorm and every mixture of experts."""
    return replace_rmsnorm(model) + replace_moe(model)


STEPS: dict[str, tuple[str, Callable[[torch.nn.Module], list[str]]]] = {
    "norm + activation": ("llama", replace_norm_and_activation),
    "int8": ("llama", replace_with_int8),
    "int4": ("llama", replace_with_int4),
    "MoE": ("mixtral", replace_norm_and_experts),
}


@dataclasses.dataclass(frozen=True)
class Row:
    """What was measured of one model at one batch size.

    Attributes:
        model: `llama` or `mixtral`.
        step: What has been replaced.
        how: `eager` or `torch.compile`.
        batch: Sequences at a time.
        replaced: Number of modules replaced.
        prefill_tokens_per_s: Tokens of prompts per second.
        decode_tokens_per_s: Tokens decoded per second, over all sequences.
        weight_bytes: Bytes of parameters and buffers.
        peak_bytes: Most memory that tensors took on the GPU, weights and cache included; None on a CPU.
        logit_difference: Largest difference of a logit, after the prompt or after the last token, from the original
            model's, eager, on the same tokens.
        largest_logit: Largest magnitude among those of the original.
        without_graph: Why no CUDA graph was replayed; empty where one was.
    """

    model: str
    step: str
    how: str
    batch: int
    replaced: int
    prefill_tokens_per_s: float
    decode_tokens_per_s: float
    weight_bytes: int
    peak_bytes: int | None
    logit_difference: float
    largest_logit: float
    without_graph: str


class Decoding:
    """Sequences of given tokens in a model with a static cache: the prompt at once, then token by token.

    Args:
        model: The model.
        forward: Its forward, compiled or not.
        batch: Sequences.
        prompt: Tokens of a prompt.
        new: Tokens after it.
    """

    def __init__(self, model: Any, forward: Callable[..., Any], batch: int, prompt: int, new: int) -> None:
        config, device = model.config, model.device
        self.prompt, self.new, self.forward = prompt, new, forward
        self.cache = transformers.StaticCache(config=config, max_cache_len=prompt + new)
        head_dim = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        self.cache.early_initialization(batch, config.num_key_value_heads, head_dim, model.dtype, device)
        # Its name in transformers has changed.
        name = "cache" if "cache" in inspect.signature(model.forward).parameters else "past_key_values"
        self.keywords = {name: self.cache, "use_cache": True, "logits_to_keep": 1}
        generator = torch.Generator(device).manual_seed(batch)
        self.tokens = torch.randint(config.vocab_size, (batch, prompt + new), generator=generator, device=device)
        # Each token sees those before it and itself.
        self.slots = torch.arange(prompt + new, device=device)
        self.prompt_mask = self.mask(self.slots[:prompt])

    def mask(self, positions: torch.Tensor) -> torch.Tensor:
        """Return which slots of the cache the tokens at some positions see: [batch, 1, positions, slots]."""
        seen = self.slots <= positions[:, None]
        return seen.expand(self.tokens.shape[0], 1, *seen.shape)

    def rewind(self, position: int) -> None:
        """Continue after as many tokens as `position`."""
        for layer in self.cache.layers:
            layer.cumulative_length.fill_(position)

    def prefill(self) -> torch.Tensor:
        """Take in the prompt; returns the logits after it, [batch, vocabulary]."""
        tokens = self.tokens[:, : self.prompt]
        return self.logits(tokens, self.prompt_mask)

    def decode(self) -> torch.Tensor:
        """Take in the next token of each sequence; returns the logits after it, [batch, vocabulary]."""
        # The cache counts on the GPU, so that a captured step goes on where the one before ended.
        position = self.cache.layers[0].cumulative_length.view(1).clone()
        token = self.tokens.index_select(1, position)
        return self.logits(token, self.mask(position))

    def logits(self, tokens: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        """Take in tokens where the cache stands; returns the logits after the last."""
        logits: torch.Tensor = self.forward(input_ids=tokens, attention_mask=mask, **self.keywords).logits
        return logits[:, -1]


def captured(function: Callable[[], torch.Tensor]) -> tuple[Callable[[], torch.Tensor], str]:
    """Return what replays a function's CUDA graph and returns its result; or the function itself, and why."""
    if not torch.cuda.is_available():
        return function, "no GPU"
    graph = torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    try:
        with torch.cuda.graph(graph):
            result = function()
    except RuntimeError as reason:
        # A capture that was broken off leaves torch's random generator in it; the next one takes it out.
        torch.cuda.synchronize()
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.zeros(1, device="cuda")
        return function, str(reason).splitlines()[0]

    def replay() -> torch.Tensor:
        graph.replay()
        return result

    return replay, ""


def seconds(run: Callable[[], object]) -> float:
    """Return how long something takes, by the GPU's clock if there is a GPU."""
    if not torch.cuda.is_available():
        start = time.perf_counter()
        run()
        return time.perf_counter() - start
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    torch.cuda.synchronize()
    begin.record()
    run()
    end.record()
    end.synchronize()
    return float(begin.elapsed_time(end)) / 1000


def measure(decoding: Decoding, samples: int) -> tuple[float, float, torch.Tensor, str]:
    """Time prefill and decode.

    Args:
        decoding: The sequences.
        samples: How often each is timed; the median counts.

    Returns:
        Seconds of the prefill, seconds of all decoding steps, logits after the prompt and after the last token
        [2, batch, vocabulary] in float32 on the CPU, and why there was no graph.
    """
    for _ in range(2):
        # Compiles, if anything has to be.
        decoding.rewind(0)
        decoding.prefill()
        decoding.decode()
    prefill, reason = captured(decoding.prefill)
    decode, decode_reason = captured(decoding.decode)
    prefill_s, decode_s = [], []
    for _ in range(samples):
        decoding.rewind(0)
        prefill_s.append(seconds(prefill))
        decode_s.append(seconds(lambda: [decode() for _ in range(decoding.new)]))
    logits = []
    for run, position in ((prefill, 0), (decode, decoding.prompt + decoding.new - 1)):
        decoding.rewind(position)
        logits.append(run().float().cpu())
    return statistics.median(prefill_s), statistics.median(decode_s), torch.stack(logits), reason or decode_reason


def build(name: str, size: str, device: str) -> Any:
    """Build a model with random weights, the same each time, in bfloat16."""
    config = CONFIGS[name](**MODELS[size][name])
    torch.manual_seed(0)
    with torch.device(device):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def contenders(steps: Sequence[str], compiled: str) -> list[tuple[str, str, str]]:
    """Return the model, the step and the way to run of all that is measured: originals before their steps."""
    found = []
    for model in dict.fromkeys(STEPS[step][0] for step in steps):
        for step in (ORIGINAL, *(step for step in steps if STEPS[step][0] == model)):
            ways = compiled == "all" or (compiled == "original" and step == ORIGINAL)
            found += [(model, step, how) for how in (EAGER, COMPILED)[: 1 + ways]]
    return found


def provenance(device: str) -> dict[str, Any]:
    """Say what made the figures."""
    gpu = current_device() if device == "cuda" else None
    try:
        triton = version("triton")
    except ImportError:
        triton = None
    return {
        "made_at": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "hardware": gpu.name if gpu else platform.processor() or platform.machine(),
        "driver": gpu.driver_version if gpu else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton,
        "transformers": transformers.__version__,
        **{package: version(package) for package in PACKAGES},
    }


def table(rows: Sequence[Row]) -> str:
    """Lay out rows, with the ratios of their speeds to those of the original, eager and compiled."""
    speeds = {
        (row.model, row.how, row.batch): (row.prefill_tokens_per_s, row.decode_tokens_per_s)
        for row in rows
        if row.step == ORIGINAL
    }
    columns = f"{'tokens/s':>10} {'x eager':>8} {'x compiled':>10}"
    lines = [
        f"{'':<48} | {'prefill':^30} | {'decode':^30} | {'memory, GB':^15} | {'logits':^15}",
        f"{'model':<8} {'step':<18} {'how':<14} {'batch':>5} | {columns} | {columns} | {'weights':>7} {'peak':>7} "
        f"| {'differ':>7} {'up to':>7}",
    ]
    for row in rows:
        cells = []
        for index, speed in enumerate((row.prefill_tokens_per_s, row.decode_tokens_per_s)):
            beside = (speeds.get((row.model, how, row.batch)) for how in (EAGER, COMPILED))
            eager, compiled = (f"{speed / other[index]:.2f}" if other else "-" for other in beside)
            cells.append(f"{speed:>10,.0f} {eager:>8} {compiled:>10}")
        peak = "-" if row.peak_bytes is None else f"{row.peak_bytes / 1e9:.3g}"
        lines.append(
            f"{row.model:<8} {row.step:<18} {row.how:<14} {row.batch:>5} | {cells[0]} | {cells[1]} "
            f"| {row.weight_bytes / 1e9:>7.3g} {peak:>7} | {row.logit_difference:>7.2g} {row.largest_logit:>7.2g}"
        )
    lines += sorted(
        {f"without a CUDA graph: {row.model}, {row.how}: {row.without_graph}" for row in rows if row.without_graph}
    )
    return "\n".join(lines)


@torch.no_grad()
def run(size: str, steps: Sequence[str], batches: Sequence[int], compiled: str, file: Path | None) -> list[Row]:
    """Measure all contenders; the file is written anew after each, so that a run cut short leaves what it has."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    prompt, new, samples = LENGTHS[size]
    settings = {"size": size, "prompt_tokens": prompt, "new_tokens": new, "samples": samples, "dtype": "bfloat16"}
    document: dict[str, Any] = {
        "provenance": provenance(device),
        "settings": {**settings, "device": device},
        "rows": [],
    }
    rows: list[Row] = []
    expected: dict[tuple[str, int], torch.Tensor] = {}
    for name, step, how in contenders(steps, compiled):
        print(f"{name}, {step}, {how}", file=sys.stderr)
        model = build(name, size, device)
        replaced = [] if step == ORIGINAL else STEPS[step][1](model)
        forward = torch.compile(model.forward, dynamic=False) if how == COMPILED else model.forward
        weights = bytes_in({"tensors": [*model.parameters(), *model.buffers()]})
        for batch in batches:
            if device == "cuda":
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()
            prefill_s, decode_s, logits, reason = measure(Decoding(model, forward, batch, prompt, new), samples)
            original = expected.setdefault((name, batch), logits)
            rows.append(
                Row(
                    name, step, how, batch, len(replaced),
                    prefill_tokens_per_s=batch * prompt / prefill_s,
                    decode_tokens_per_s=batch * new / decode_s,
                    weight_bytes=weights,
                    peak_bytes=torch.cuda.max_memory_allocated() if device == "cuda" else None,
                    logit_difference=(logits - original).abs().max().item(),
                    largest_logit=original.abs().max().item(),
                    without_graph=reason,
                )
            )  # fmt: skip
        if file is not None:
            document["rows"] = [dataclasses.asdict(row) for row in rows]
            file.write_text(json.dumps(document, indent=2) + "\n", encoding="utf-8")
        del model, forward
        torch._dynamo.reset()
        gc.collect()
    return rows


def main(arguments: Sequence[str] | None = None) -> None:
    """Read the command line, measure, and print the table."""
    has_gpu = torch.cuda.is_available()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--size", choices=MODELS, default="8b" if has_gpu else "small", help="default: 8b on a GPU")
    parser.add_argument("--steps", nargs="+", choices=STEPS, default=list(STEPS), help="default: all")
    parser.add_argument("--batch", nargs="+", type=int, default=[1, 16], help="sequences at a time; default: 1 16")
    parser.add_argument(
        "--compile", choices=("none", "original", "all"), default="original" if has_gpu else "none",
        help="what also runs under torch.compile: the models as they were, or all of them; default: none on a CPU",
    )  # fmt: skip
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures, and what made them")
    options = parser.parse_args(arguments)
    if options.size == "8b" and not has_gpu:
        parser.error("--size 8b needs a GPU")
    rows = run(options.size, options.steps, options.batch, options.compile, options.json)
    made_by = provenance("cuda" if has_gpu else "cpu")
    print(f"{options.size} models on {made_by['hardware']}, torch {made_by['torch']}, {made_by['made_at']}")
    if not has_gpu:
        print("By the PyTorch references on a CPU: these times say nothing about a GPU.")
    print(table(rows))


if __name__ == "__main__":
    main()

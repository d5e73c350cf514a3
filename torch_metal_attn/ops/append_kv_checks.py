"""What csrc/ops/cache/check_append_kv.cpp checks without data: on meta, and while compiling.

Values of indices and shared memory cannot be checked there.
"""

from torch import Tensor

from torch_metal_attn.ops import cache_checks, rules

_NAMES = cache_checks.Names("k", "k_cache", "v_cache")


def append_kv(
    k: Tensor,
    v: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    cache_seqlens: Tensor | None = None,
    *,
    q: Tensor | None = None,
    block_table: Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    leftpad_k: Tensor | None = None,
    k_scale: Tensor | None = None,
    v_scale: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    rotary_interleaved: bool = False,
    rotate_q_by_token: bool = True,
    rotary_from_leftpad: bool = True,
) -> None:
    """The checks of `metal_attn::append_kv`."""
    new = {"k": k, "v": v} | ({} if q is None else {"q": q})
    caches = {"k_cache": k_cache, "v_cache": v_cache}
    tables = {"rotary_cos": rotary_cos, "rotary_sin": rotary_sin}
    for name, tensor in (new | caches | tables).items():
        if tensor is not None:
            rules.same_device(name, tensor, k, "k")
    rules.element("k", k)
    for name, tensor in new.items():
        rules.same_dtype(name, tensor, k, "k")
    for name, tensor in (new | caches).items():
        _rows(name, tensor)
    batch, heads, length, head_dim = k.shape
    rules.shape("v", v, [(batch, heads, length, v.shape[3])])

    options = {
        "block_table": block_table,
        "cache_batch_idx": cache_batch_idx,
        "k_scale": k_scale,
        "v_scale": v_scale,
    }
    format = cache_checks.kv_format(k, k_cache, v_cache, options, _NAMES)
    capacity = cache_checks.capacity(k, k_cache, batch, options, _NAMES)
    packed = 2 if format == "q4_0" else 1
    for name, cache, columns in (
        ("k_cache", k_cache, head_dim),
        ("v_cache", v_cache, v.shape[3]),
    ):
        places = (k_cache.shape[0], heads, k_cache.shape[2])
        rules.shape(name, cache, [(*places, columns // packed)])
    cache_checks.scales(k_cache, v_cache, batch, format, options, _NAMES)

    for name, tensor in (("cache_seqlens", cache_seqlens), ("leftpad_k", leftpad_k)):
        if tensor is not None:
            rules.index(name, tensor, k, "k")
            rules.shape(name, tensor, [(batch,)])
    rules.rule(
        cache_checks.indexed(options) or k_cache.shape[0] == batch,
        lambda: (
            f"k_cache has a batch of {k_cache.shape[0]} and k of {batch}; without "
            "cache_batch_idx they must be equal"
        ),
    )
    rules.rule(
        length <= capacity,
        lambda: f"k has a length of {length} and k_cache room for {capacity} rows of a sequence",
    )
    _rotary(rotary_cos, rotary_sin, rotary_interleaved, q, head_dim)
    if q is not None:
        rules.shape("q", q, [(batch, q.shape[1], q.shape[2], head_dim)])


def _rotary(
    cos: Tensor | None, sin: Tensor | None, interleaved: bool, q: Tensor | None, head_dim: int
) -> None:
    rules.rule(
        (cos is None) == (sin is None),
        lambda: "only one of rotary_cos and rotary_sin is given; give both or neither",
    )
    if cos is None or sin is None:
        rules.rule(
            q is None,
            lambda: "q is given and rotary_cos is not, which is all that q is for",
        )
        rules.rule(
            not interleaved,
            lambda: "rotary_interleaved is True and rotary_cos is not given",
        )
        return
    rules.element("rotary_cos", cos)
    rules.same_dtype("rotary_sin", sin, cos, "rotary_cos")
    rules.rule(
        cos.dim() == 2,
        lambda: f"rotary_cos has {cos.dim()} dimensions; it must have 2: (rows, R / 2)",
    )
    rules.shape("rotary_sin", sin, [tuple(cos.shape)])
    rules.rule(cos.shape[0] > 0, lambda: "rotary_cos has no rows")
    rules.rule(
        2 * cos.shape[1] <= head_dim,
        lambda: (
            f"rotary_cos has {cos.shape[1]} columns and k a head dim of {head_dim}; they must be "
            "at most half of it"
        ),
    )


def _rows(name: str, tensor: Tensor) -> None:
    rules.rule(
        tensor.dim() == 4,
        lambda: (
            f"{name} has {tensor.dim()} dimensions, shape {tuple(tensor.shape)}; it must have 4"
        ),
    )
    rules.last_stride(name, tensor)

"""Dense baselines for a Qwen3 or RecSA-Qwen3 checkpoint, which `generate()` runs by the same loop as RecSA.

    model = load_baseline("Qwen/Qwen3-4B", "dca", tokens=131072, trained=32768)
    model.generate(ids, max_new_tokens=64)

* "dense": stock Qwen3 as it is.
* "yarn": stock Qwen3 with YaRN (arXiv 2309.00071), its factor by the length.
* "dca": Dual Chunk Attention (arXiv 2402.17463): positions are counted inside chunks, so that none exceeds the trained
  length; every token is read.
* "recsa": the checkpoint as this repository runs it, so that one call loads all that are compared.

This file knows no task and measures nothing.
"""

from __future__ import annotations

import hashlib
import inspect
import math
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel, Qwen3Config, Qwen3ForCausalLM
from transformers.models.qwen3.modeling_qwen3 import Qwen3Attention, Qwen3RotaryEmbedding
from transformers.utils import logging

from convert_qwen3 import raise_limit
from recsa_qwen3 import RecSAQwen3Config, RecSAQwen3ForCausalLM
from recsa_qwen3.attention_recsa_qwen3 import rotate
from recsa_qwen3.configuration_recsa_qwen3 import ROPE_TYPES, TRAINED_TOKENS
from recsa_qwen3.distillation_recsa_qwen3 import yarn_parameters
from recsa_qwen3.tree_recsa_qwen3 import accumulation_dtype

METHODS = ("recsa", "dense", "yarn", "dca")
SCALINGS = (None, "yarn-attention")
BACKENDS = ("auto", "flash", "blockwise")
# Queries whose logits the blockwise path holds at a time, and elements of those logits (256 MiB in float32).
_BLOCK_QUERIES = 256
_BLOCK_ELEMENTS = 1 << 26

Rotations = tuple[tuple[torch.Tensor, torch.Tensor], ...]
Part = tuple[torch.Tensor, torch.Tensor]


def load_baseline(
    path: str | os.PathLike[str],
    method: str,
    tokens: int,
    *,
    trained: int | None = None,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device | None = None,
    **options: Any,
) -> PreTrainedModel:
    """Loads a checkpoint for evaluation with one of the methods that are compared.

    Args:
        path: folder or Hub id of a Qwen3 or RecSA-Qwen3 causal language model. The dense methods leave the poolers of
            the latter out; what they load equals the stock checkpoint that it was converted from.
        method: "recsa" (a RecSA-Qwen3 checkpoint only), "dense", "yarn" or "dca".
        tokens: of the longest prompt with its answer. YaRN's factor is exactly tokens / trained, not rounded up to a
            power of two; up to `trained` tokens there is no scaling, and "yarn" is "dense". The other settings are
            those published for Qwen3: the trained length as the original one, transformers' attention factor.
        trained: tokens of the sequences that the dense model was trained on; by default a RecSA-Qwen3 checkpoint's
            `recsa_trained_length`, else `max_position_embeddings`. The published Qwen3 checkpoints state 40,960 there
            and were trained on 32,768.
        dtype: of the weights: a floating-point `torch.dtype`, its name, or "auto" for the checkpoint's.
        device: where the model goes; a CUDA device if there is one.
        **options: for "recsa", the `recsa_*` fields of its configuration. For "dca", those of `dual_chunks`: `chunk`,
            `local_window`, `scaling`, `backend`.

    Returns:
        A model in eval mode. For "dense" and "yarn" a stock `Qwen3ForCausalLM` on SDPA, which builds no mask for a
        prompt without padding that is read in one forward (a chunked prefill builds [chunk, length]). For "dca" a
        `DualChunkQwen3ForCausalLM`.

    Raises:
        ValueError: an unknown method or option, an impossible value, another kind of checkpoint, weights that are not
            exactly Qwen3's; for "yarn" as `yarn_parameters`.
    """
    if method not in METHODS:
        raise ValueError(f"method={method!r}: must be one of {', '.join(METHODS)}.")
    _check_count("tokens", tokens)
    if trained is not None:
        _check_count("trained", trained)
    _check_options(method, options)
    dtype = _checked_dtype(dtype)
    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    kind = PreTrainedConfig.get_config_dict(path)[0].get("model_type")
    if kind not in ("qwen3", "recsa_qwen3"):
        raise ValueError(f"path={str(path)!r}: model_type {kind!r}; must be a qwen3 or recsa_qwen3 checkpoint.")
    if method == "recsa":
        if kind != "recsa_qwen3":
            raise ValueError(
                f"path={str(path)!r}: method 'recsa' needs a RecSA-Qwen3 checkpoint; make one with "
                "scripts/convert_qwen3.py and train its poolers."
            )
        return RecSAQwen3ForCausalLM.from_pretrained(path, dtype=dtype, **options).to(device).eval()
    config, stated = _dense_config(path, kind)
    trained = trained or stated
    model_class: type[Qwen3ForCausalLM] = Qwen3ForCausalLM
    if method == "yarn" and tokens > trained:
        config.rope_parameters = yarn_parameters(config.rope_parameters, tokens, trained)
    if method == "dca":
        config.dual_chunks = dual_chunks(trained, tokens, **options)._asdict()
        model_class = DualChunkQwen3ForCausalLM
    return _load_weights(model_class, path, config, dtype).to(device).eval()


def checkpoint_digest(path: str | os.PathLike[str]) -> str:
    """Tells checkpoints apart, whatever their folders are called: 16 hex digits of configuration and weights.

    A Hub id stands for itself.
    """
    folder, digest = Path(path), hashlib.sha256()
    if not folder.is_dir():
        return str(path)
    for file in sorted([*folder.glob("config.json"), *folder.glob("*.safetensors")]):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 24):
                digest.update(block)
    return digest.hexdigest()[:16]


def _check_count(name: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise ValueError(f"{name}={value!r}: must be an int >= 1.")


def _check_options(method: str, options: dict[str, Any]) -> None:
    known: list[str] = []
    if method == "recsa":
        known = [name for name in inspect.signature(RecSAQwen3Config.__init__).parameters if name.startswith("recsa_")]
    elif method == "dca":
        known = list(inspect.signature(dual_chunks).parameters)[2:]
    unknown = sorted(set(options) - set(known))
    if unknown:
        allowed = f"has {', '.join(known)}" if known else "has no options"
        raise ValueError(f"{', '.join(unknown)}: no option of method {method!r}, which {allowed}.")


def _checked_dtype(dtype: str | torch.dtype) -> str | torch.dtype:
    if dtype == "auto":
        return dtype
    found = getattr(torch, dtype, None) if isinstance(dtype, str) else dtype
    if not isinstance(found, torch.dtype) or not found.is_floating_point:
        raise ValueError(f"dtype={dtype!r}: must be 'auto', or a floating-point torch dtype or its name.")
    return found


def _dense_config(path: str | os.PathLike[str], kind: str) -> tuple[Qwen3Config, int]:
    """A stock configuration that allows any length, and the trained length that the checkpoint states."""
    if kind == "recsa_qwen3":
        recsa = RecSAQwen3Config.from_pretrained(path)
        left_out = ("auto_map", "model_type", "architectures", "transformers_version")
        fields = {
            name: value
            for name, value in recsa.to_dict().items()
            if not name.startswith("recsa_") and name not in left_out
        }
        config = Qwen3Config.from_dict(fields | {"architectures": ["Qwen3ForCausalLM"]})
        trained = recsa.recsa_trained_length or TRAINED_TOKENS
    else:
        config = Qwen3Config.from_pretrained(path)
        trained = config.max_position_embeddings
    if config.rope_parameters["rope_type"] in ROPE_TYPES:  # the frequencies of the others go with the limit
        raise_limit(config)
    return config, trained


def _load_weights(
    model_class: type[Qwen3ForCausalLM],
    path: str | os.PathLike[str],
    config: Qwen3Config,
    dtype: str | torch.dtype,
) -> Qwen3ForCausalLM:
    verbosity = logging.get_verbosity()
    logging.set_verbosity_error()  # poolers are reported as unexpected
    try:
        model, report = model_class.from_pretrained(
            path, config=config, dtype=dtype, attn_implementation="sdpa", output_loading_info=True
        )
    finally:
        logging.set_verbosity(verbosity)
    extra = [name for name in report["unexpected_keys"] if ".self_attn.pooler." not in name]
    wrong = sorted(str(name) for name in (*report["missing_keys"], *report["mismatched_keys"], *extra))
    if wrong:
        raise ValueError(
            f"path={str(path)!r}: missing, unexpected or of another shape: {', '.join(wrong[:6])} ({len(wrong)} in "
            "all); must be a causal language model with exactly Qwen3's tensors."
        )
    return model


# ---------------------------------------------------------------------------------------------------------------------
# Dual Chunk Attention
# ---------------------------------------------------------------------------------------------------------------------


class DualChunks(NamedTuple):
    """How Dual Chunk Attention counts positions.

    A key at token j always has position j mod s. A query at token t has, for the keys of its own chunk, t mod s; for
    those of the chunk before it, s + t mod s in the first w tokens of its chunk and c - 1 in the others; for all
    earlier ones c - 1. With w = c - s the second is min(s + t mod s, c - 1).

    Attributes:
        chunk: s, tokens in a chunk.
        trained: c, tokens that the model was trained on.
        local_window: w, tokens at a chunk's begin whose distances to the chunk before are true.
        logit_factor: on all logits, beside Qwen3's own.
        backend: "auto", "flash" or "blockwise".
    """

    chunk: int
    trained: int
    local_window: int
    logit_factor: float
    backend: str


def dual_chunks(
    trained: int,
    tokens: int,
    chunk: int | None = None,
    local_window: int | None = None,
    scaling: str | None = None,
    backend: str = "auto",
) -> DualChunks:
    """The settings of Dual Chunk Attention.

    Args:
        trained: c, tokens that the model was trained on, at least 2.
        tokens: of the longest prompt with its answer, for `scaling`.
        chunk: s < c; 3/4 of c by default. [arXiv 2402.17463]
        local_window: w, 1 ... c - s; c - s by default. [arXiv 2402.17463]
        scaling: `None`, or "yarn-attention": all logits times 0.1 ln(tokens / c) + 1 where tokens > c. The idea is
            that of Qwen2.5-1M (arXiv 2501.15383); the factor stands once, as in the code published for those models
            (vLLM's dual_chunk_flash_attn.py multiplies the keys by it), where YaRN has its square. There it goes
            with the length so far; here with `tokens`, so that all steps of a text have one factor. [our decision]
        backend: "flash" (CUDA, float16 or bfloat16, no gradient), "blockwise" (any device; products in float32 at
            least) or "auto": flash where it can run.

    Raises:
        ValueError: an impossible value, by name.
    """
    _check_count("trained", trained)
    if trained < 2:
        raise ValueError(f"trained={trained}: Dual Chunk Attention needs at least 2, a chunk and a window.")
    chunk = max(1, trained * 3 // 4) if chunk is None else chunk
    _check_count("chunk", chunk)
    if chunk >= trained:
        raise ValueError(f"chunk={chunk}: must be below the trained length, {trained}.")
    local_window = trained - chunk if local_window is None else local_window
    _check_count("local_window", local_window)
    if local_window > trained - chunk:
        raise ValueError(f"local_window={local_window}: must be at most trained - chunk = {trained - chunk}.")
    if scaling not in SCALINGS:
        raise ValueError(f"scaling={scaling!r}: must be None or 'yarn-attention'.")
    if backend not in BACKENDS:
        raise ValueError(f"backend={backend!r}: must be one of {', '.join(BACKENDS)}.")
    factor = 0.1 * math.log(tokens / trained) + 1.0 if scaling and tokens > trained else 1.0
    return DualChunks(chunk, trained, local_window, factor, backend)


class DualChunkRotaryEmbedding(Qwen3RotaryEmbedding):
    """Cos and sin of a query's three positions; the first are the key's as well."""

    def forward(self, x: torch.Tensor, position_ids: torch.Tensor) -> Rotations:
        """Takes token positions `[1 or B, T]`.

        Returns:
            (cos, sin) in the dtype of `x`: of the own chunk and of the chunk before `[1 or B, T, D]`, of all earlier
            ones `[1, 1, D]`.
        """
        chunks = DualChunks(**self.config.dual_chunks)
        last = chunks.trained - 1
        own = position_ids % chunks.chunk
        before = torch.where(own < chunks.local_window, own + chunks.chunk, last)
        tables = super().forward
        return tables(x, own), tables(x, before), tables(x, own.new_full((1, 1), last))


class DualChunkAttention(Qwen3Attention):
    """Qwen3's attention with the positions of Dual Chunk Attention; the cache keeps keys rotated, as stock does."""

    backend_ran: str | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        position_embeddings: Rotations,
        attention_mask: None = None,
        cache: DynamicCache | None = None,
        past_key_values: DynamicCache | None = None,
        **kwargs: Any,
    ) -> tuple[torch.Tensor, None]:
        """Takes and returns `[B, T, hidden]`; `cache` and `past_key_values` are the versions' names of one thing."""
        cache = cache if cache is not None else past_key_values
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        query = self.q_norm(self.q_proj(hidden_states).view(shape)).transpose(1, 2)
        key = self.k_norm(self.k_proj(hidden_states).view(shape)).transpose(1, 2)
        value = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings[0]
        key = rotate(key, cos[:, None], sin[:, None])
        if cache is not None:
            key, value = cache.update(key, value, self.layer_idx)
        chunks = DualChunks(**self.config.dual_chunks)
        self.backend_ran = choose_backend(chunks.backend, query)
        output = dual_chunk_attention(
            query, key, value, position_embeddings, chunks.chunk, self.scaling * chunks.logit_factor, self.backend_ran
        )
        return self.o_proj(output.transpose(1, 2).flatten(2)), None


class DualChunkQwen3ForCausalLM(Qwen3ForCausalLM):
    """Qwen3 with Dual Chunk Attention as `config.dual_chunks` says (the fields of `DualChunks`).

    For evaluation: rows of one length without padding, any prefill (whole or in chunks), any growing cache. The first
    s + w tokens' logits are stock Qwen3's, up to rounding and apart from `scaling`. `forward` raises a ValueError for
    padding, positions of the caller's own, a cache of fixed size, dropout, and attention weights as an output.
    """

    def __init__(self, config: Qwen3Config):
        super().__init__(config)
        rope_type = config.rope_parameters["rope_type"]
        if rope_type not in ROPE_TYPES:
            raise ValueError(f"rope_parameters: rope_type {rope_type!r}; must be one of {', '.join(ROPE_TYPES)}.")
        if self.model.has_sliding_layers:
            raise ValueError("use_sliding_window / layer_types: Dual Chunk Attention supports full attention only.")
        self.model.rotary_emb = DualChunkRotaryEmbedding(config)
        for index, layer in enumerate(self.model.layers):
            layer.self_attn = DualChunkAttention(config, index)
        self.model.register_forward_pre_hook(_check_call, with_kwargs=True)

    @property
    def last_backend(self) -> str | None:
        """Which implementation the last forward ran: "flash" or "blockwise"; `None` before the first."""
        return self.model.layers[0].self_attn.backend_ran


def _check_call(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict]:
    """Refuses what Dual Chunk Attention here cannot do, and keeps Qwen3 from building a mask that nobody reads."""
    if len(args) > 1:
        raise ValueError("Dual Chunk Attention: pass all arguments but input_ids by keyword.")
    config: Any = module.config
    if kwargs.get("output_attentions", config.output_attentions):
        raise ValueError("output_attentions: the attention weights are never held; leave it out.")
    if module.training and config.attention_dropout:
        raise ValueError("attention_dropout: not supported by Dual Chunk Attention; call model.eval().")
    named = (kwargs.get(name) for name in ("cache", "past_key_values"))
    cache = next((found for found in named if found is not None), None)
    if cache is not None and not isinstance(cache, DynamicCache):
        raise ValueError(
            f"cache: {type(cache).__name__} is not supported by Dual Chunk Attention; leave cache_implementation out."
        )
    mask = kwargs.get("attention_mask")
    if mask is not None and not (isinstance(mask, torch.Tensor) and mask.dim() == 2 and mask.all()):
        raise ValueError(
            "attention_mask: padding and masks of one's own are not supported by Dual Chunk Attention; run prompts of "
            "different lengths one by one."
        )
    positions = kwargs.get("position_ids")
    if positions is not None:
        begin = cache.get_seq_length() if cache is not None else 0
        expected = torch.arange(begin, begin + positions.shape[-1], device=positions.device)
        if not (positions == expected).all():
            raise ValueError("position_ids: Dual Chunk Attention counts tokens from 0 without gaps; leave it out.")
    return args, kwargs | {"attention_mask": {"full_attention": None}}


def choose_backend(backend: str, query: torch.Tensor) -> str:
    """The implementation, "flash" or "blockwise", for queries `[B, H, T, D]`.

    Raises:
        ValueError: "flash" asked for where it cannot run; says why.
    """
    obstacle = None
    if query.device.type != "cuda" or torch.cuda.get_device_capability(query.device) < (8, 0):
        obstacle = f"a CUDA GPU of compute capability 8.0 or more, not {query.device}"
    elif query.dtype not in (torch.float16, torch.bfloat16):
        obstacle = f"float16 or bfloat16, not {query.dtype}"
    elif query.shape[-1] % 8 or query.shape[-1] > 256:
        obstacle = f"a head_dim that 8 divides, up to 256, not {query.shape[-1]}"
    elif torch.is_grad_enabled() and query.requires_grad:
        obstacle = "no gradient (its log-sum-exp has none): torch.no_grad()"
    if backend == "flash" and obstacle:
        raise ValueError(f"backend='flash': needs {obstacle}; or use 'auto' or 'blockwise'.")
    if backend == "auto":
        return "blockwise" if obstacle else "flash"
    return backend


def dual_chunk_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    rotations: Rotations,
    chunk: int,
    scaling: float,
    backend: str,
) -> torch.Tensor:
    """Causal attention of the last T of N tokens, with positions counted inside chunks (arXiv 2402.17463).

    The softmax runs over three kinds of keys at once: each is attended to alone, with queries rotated for it, and the
    outputs are merged by their log-sum-exp.

    Args:
        query: of the last T tokens, before RoPE, `[B, H, T, D]`.
        key: of all tokens, rotated at position j mod s, `[B, H_kv, N, D]`.
        value: `[B, H_kv, N, D]`.
        rotations: of the queries, as `DualChunkRotaryEmbedding` gives them.
        chunk: s.
        scaling: factor on the logits.
        backend: "flash" or "blockwise".

    Returns:
        `[B, H, T, D]` in the dtype of `query`.
    """
    attend, tokens = PARTS[backend], key.shape[2]
    most = chunk if backend == "flash" else _BLOCK_QUERIES
    output, start = torch.empty_like(query), tokens - query.shape[2]
    begin = start
    while begin < tokens:  # queries begin ... end - 1, all in the chunk that starts at `first`
        first = begin // chunk * chunk
        end = min(first + chunk, begin + most, tokens)
        rows = slice(begin - start, end - start)
        states = query[:, :, rows]
        own, before = (rotate(states, cos[:, None, rows], sin[:, None, rows]) for cos, sin in rotations[:2])
        # a square where causality cuts, so that no kernel's alignment of a longer one matters; one query needs no cut
        square = begin if end - begin > 1 else first
        spans = [(own, square, end, end - begin > 1), (own, first, square, False)]
        spans.append((before, max(first - chunk, 0), first, False))
        if first > chunk:
            cos, sin = rotations[2]
            spans.append((rotate(states, cos[:, None], sin[:, None]), 0, first - chunk, False))
        parts = [
            attend(turned, key[:, :, low:high], value[:, :, low:high], causal, scaling)
            for turned, low, high, causal in spans
            if low < high
        ]
        output[:, :, rows] = merge(parts)[0].to(output.dtype)
        begin = end
    return output


def merge(parts: list[Part]) -> Part:
    """One softmax over the keys of all parts: of outputs `[..., T, D]` and log-sum-exps `[..., T]`."""
    if len(parts) == 1:
        return parts[0]
    total = torch.logsumexp(torch.stack([lse for _, lse in parts]), 0)
    merged = sum(output.to(lse.dtype) * (lse - total).exp()[..., None] for output, lse in parts)
    return merged, total  # type: ignore[return-value]


def flash_part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scaling: float) -> Part:
    """Attention and log-sum-exp (float32 `[B, H, T]`) by PyTorch's FlashAttention; KV heads are not copied."""
    output, lse, *_ = torch.ops.aten._scaled_dot_product_flash_attention(
        query, key, value, 0.0, causal, False, scale=scaling
    )
    return output, lse.view(query.shape[:3])


def blockwise_part(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, causal: bool, scaling: float) -> Part:
    """Attention and log-sum-exp by plain products in the accumulation dtype, a block of keys at a time.

    Args:
        query: rotated, `[B, H, T, D]`.
        key, value: `[B, H_kv, n, D]`.
        causal: whether query i reads keys 0 ... i only; then n = T.
        scaling: factor on the logits.

    Returns:
        `[B, H, T, D]` and `[B, H, T]`.
    """
    dtype, shape = accumulation_dtype(query.dtype), query.shape
    rows = (query.to(dtype) * scaling).unflatten(1, (key.shape[1], -1)).flatten(2, 3)  # [B, H_kv, G * T, D]
    size = key.shape[2] if causal else max(1, _BLOCK_ELEMENTS // rows[..., 0].numel())
    parts = []
    for low in range(0, key.shape[2], size):
        keys, values = (states[:, :, low : low + size].to(dtype) for states in (key, value))
        logits = rows @ keys.transpose(2, 3)
        if causal:
            later = torch.ones(shape[2], size, dtype=torch.bool, device=query.device).triu(1)
            logits = logits.unflatten(2, (-1, shape[2])).masked_fill(later, -torch.inf).flatten(2, 3)
        lse = logits.logsumexp(-1)
        parts.append(((logits - lse[..., None]).exp() @ values, lse))
        if len(parts) > 1:
            parts = [merge(parts)]
    output, lse = parts[0]
    return output.view(shape), lse.view(shape[:3])


PARTS: dict[str, Callable[..., Part]] = {"flash": flash_part, "blockwise": blockwise_part}

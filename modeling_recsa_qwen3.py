"""RecSA-Qwen3: Qwen3 whose attention walks a tree over its keys and values.

The entry file for `trust_remote_code`: attention module, decoder layer, model and heads. The operator, the tree, the
cache and the bookkeeping of rows live in the sibling modules, which this file imports one by one because older loaders
copy only the entry file's direct imports. Nothing here decides what a query reads.
"""

import copy
import dataclasses
import inspect
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from transformers import initialization as init
from transformers.activations import ACT2FN
from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, TensorParallelLayer
from transformers.generation import GenerationMixin, GenerationMode
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_outputs import (
    BaseModelOutputWithPast,
    CausalLMOutputWithPast,
    QuestionAnsweringModelOutput,
    SequenceClassifierOutputWithPast,
    TokenClassifierOutput,
)
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS, PreTrainedModel
from transformers.models.qwen3.modeling_qwen3 import Qwen3MLP, Qwen3RMSNorm
from transformers.utils import can_return_tuple, logging

from .attention_recsa_qwen3 import RecSAOutput, check_backend, prefers_kernels, recsa_attention, rotary_tables, rotate
from .cache_files_recsa_qwen3 import note_model
from .cache_layer_recsa_qwen3 import RecSALayer  # noqa: F401
from .cache_recsa_qwen3 import RecSACache
from .configuration_recsa_qwen3 import RecSAQwen3Config
from .distillation_recsa_qwen3 import layer_loss, teacher_tables, zero_of
from .float8_recsa_qwen3 import pack  # noqa: F401
from .memory_recsa_qwen3 import free_bytes  # noqa: F401
from .progress_recsa_qwen3 import reading
from .recall_recsa_qwen3 import needle_recall
from .rows_recsa_qwen3 import PendingRows, Rows
from .sampling_recsa_qwen3 import SampledQueries, draw_queries
from .trace_recsa_qwen3 import RecSATrace, recsa_trace
from .tree_recsa_qwen3 import RecSAPooler, TreeGeometry, build_levels

try:  # named so that loaders copy them; attention_recsa_qwen3 remembers why they failed
    from .kernels_backward_recsa_qwen3 import attend_with_gradients  # noqa: F401
    from .kernels_build_recsa_qwen3 import build_nodes_by_kernel, pack_by_kernel
    from .kernels_common_recsa_qwen3 import launching_on
    from .kernels_decode_recsa_qwen3 import decode_block  # noqa: F401
    from .kernels_linear_recsa_qwen3 import project  # noqa: F401
    from .kernels_norm_recsa_qwen3 import rms_norm
    from .kernels_prefill_recsa_qwen3 import PrefillBlock  # noqa: F401
    from .kernels_select_recsa_qwen3 import choose  # noqa: F401
    from .kernels_walk_recsa_qwen3 import TritonWalk, unsupported  # noqa: F401
    from .step_recsa_qwen3 import DecodingStep, PlainModules
except Exception:
    unsupported = None  # type: ignore[assignment]

logger = logging.get_logger(__name__)

# From 5.24 outputs call the cache `cache`, before `past_key_values`.
CACHE_FIELD = (
    "cache" if "cache" in {field.name for field in dataclasses.fields(BaseModelOutputWithPast)} else "past_key_values"
)


# Tokens of an answer for which room is reserved where `generate` allows as many.
LEAST_ANSWER = 1024


@dataclasses.dataclass
class RecSAModelOutputWithPast(BaseModelOutputWithPast):
    """Outputs of the decoder; `distill_loss` as in `RecSACausalLMOutputWithPast`."""

    distill_loss: torch.FloatTensor | None = None


@dataclasses.dataclass
class RecSACausalLMOutputWithPast(CausalLMOutputWithPast):
    """Outputs of the language model.

    Attributes:
        distill_loss: KL of the poolers in nats, a scalar: the sum over levels, the mean over layers; not yet times
            `recsa_distill_weight`. `None` where it is not computed.
    """

    distill_loss: torch.FloatTensor | None = None


def tokens_to_reserve(prompt: int, most: int) -> int:
    """Tokens a row to make room for, behind a prompt whose answer may bring it to `most` tokens.

    The limit of an answer is often far beyond its end: a quarter of the prompt, and LEAST_ANSWER where that is more.
    """
    return prompt + min(max(most - prompt, 0), max(LEAST_ANSWER, prompt // 4))


def runs_kernels(module: nn.Module, config: RecSAQwen3Config, states: torch.Tensor) -> bool:
    """Whether what surrounds the operator runs on kernels as well: asked for, and no gradient wanted.

    Nor in training: reentrant checkpointing computes a first forward without gradients and a second with them, and
    both must choose alike.
    """
    return (
        prefers_kernels(config.recsa_backend, states.device)
        and unsupported is not None
        and not (torch.is_grad_enabled() or module.training)
        and unsupported(states) is None
    )


def eager_attention(module, query, key, value, attention_mask, scaling, dropout=0.0, **kwargs):
    """Dense attention with its logits in memory, as stock Qwen3's eager path: softmax in float32.

    Shapes as for every function of `ALL_ATTENTION_FUNCTIONS`: query `[B, H, T, D]`, key and value `[B, H_kv, N, D]`,
    `attention_mask` bool (True = read) or `None` for causal; returns `[B, T, H, D]` and the weights.
    """
    key = key.repeat_interleave(module.num_key_value_groups, 1)
    value = value.repeat_interleave(module.num_key_value_groups, 1)
    logits = query @ key.transpose(2, 3) * scaling
    if attention_mask is None:
        queries, keys = logits.shape[-2:]
        attention_mask = torch.ones(queries, keys, dtype=torch.bool, device=logits.device).tril(keys - queries)
    logits = logits.masked_fill(~attention_mask, torch.finfo(logits.dtype).min)
    weights = torch.softmax(logits, -1, dtype=torch.float32).to(query.dtype)
    weights = nn.functional.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2), weights


class RecSAPoolerParallel(TensorParallelLayer):
    """How a tensor-parallel plan treats a pooler: kept whole by every process, which uses its own KV heads' part."""

    def install_forward(self, module: RecSAPooler, mesh) -> RecSAPooler:
        """Tells the pooler which processes share its heads.

        Raises:
            ValueError: the KV heads cannot be shared evenly.
        """
        heads = len(module.query)
        if heads % mesh.size():
            raise ValueError(f"tp_size={mesh.size()}: must divide num_key_value_heads={heads}.")
        module.mesh = mesh
        return module


ALL_PARALLEL_STYLES.register("recsa_pooler", RecSAPoolerParallel())


class RecSAQwen3Attention(nn.Module):
    """Qwen3's attention projections around `recsa_attention`.

    Attributes:
        last_backend: what ran in the last forward, as `RecSAOutput.backend`; `None` before.
        trace: the active `RecSATrace`, if any.
    """

    def __init__(self, config: RecSAQwen3Config, layer_idx: int):
        super().__init__()
        self.config = config
        self.layer_idx = layer_idx
        self.head_dim = config.head_dim
        self.num_key_value_groups = config.num_attention_heads // config.num_key_value_heads
        self.scaling = self.head_dim**-0.5
        self.attention_dropout = config.attention_dropout
        self.is_causal = True
        heads, kv_heads, bias = config.num_attention_heads, config.num_key_value_heads, config.attention_bias
        self.q_proj = nn.Linear(config.hidden_size, heads * self.head_dim, bias=bias)
        self.k_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.v_proj = nn.Linear(config.hidden_size, kv_heads * self.head_dim, bias=bias)
        self.o_proj = nn.Linear(heads * self.head_dim, config.hidden_size, bias=bias)
        self.q_norm = RecSAQwen3RMSNorm(self.head_dim, config)
        self.k_norm = RecSAQwen3RMSNorm(self.head_dim, config)
        self.pooler = RecSAPooler(kv_heads, config.recsa_branching, self.head_dim)
        self.last_backend: str | None = None
        self.trace: RecSATrace | None = None

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: Rows | None = None,
        cache: RecSACache | None = None,
        output_attentions: bool = False,
        step: "DecodingStep | None" = None,
        sampled: SampledQueries | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """Attends from `hidden_states` `[B, T, hidden]`.

        Args:
            hidden_states: the layer's normalised input.
            rows: which columns are which sequence's tokens; every column a token of its row where `None`.
            cache: appended to, where given.
            output_attentions: also returns the matrix A `[B, H, T, columns seen + T]`.
            step: appends and attends in place of all else, without reading a length on the host.
            sampled: at which queries the pooler is distilled, which then learns from nothing else. Where nothing but
                poolers learns, attention is the teacher's: dense, so that deeper layers see what they were trained on.

        Returns:
            `[B, T, hidden]`, A or `None`, and with `sampled` the distillation loss, a scalar.
        """
        batch, width = hidden_states.shape[:2]
        if rows is None:
            rows = Rows.whole(
                batch, width, cache.layers[self.layer_idx].history.lengths if cache is not None else None
            )
        heads = (batch, width, -1, self.head_dim)
        query = rows.gather(self.q_norm(self.q_proj(hidden_states).view(heads)).transpose(1, 2))
        key = rows.gather(self.k_norm(self.k_proj(hidden_states).view(heads)).transpose(1, 2))
        value = rows.gather(self.v_proj(hidden_states).view(heads).transpose(1, 2))

        geometry = TreeGeometry.from_config(self.config)
        if step is not None:
            attended = step.attend(self.layer_idx, query, key, value, self.pooler, self.scaling)
            self.last_backend = "triton"
            return self.o_proj(attended.transpose(1, 2).reshape(batch, width, -1)), None
        if sampled is not None and sampled.frozen:
            tables = teacher_tables(self.config, query.device, rows.counts)
            cos, sin = (table[..., None, : rows.width, :] for table in tables)
            attended = self._attend_densely(rotate(query, cos, sin), rotate(key, cos, sin), value, None)
            self.last_backend = "dense"
            if self.trace is not None:
                self.trace.record(self.layer_idx, rows, RecSAOutput(attended, None, None, "dense"))
            output = self.o_proj(rows.scatter(attended).transpose(1, 2).reshape(batch, width, -1))
            return output, None, layer_loss(query, key, self.pooler, self.config, rows.counts, sampled, self.scaling)
        longest = max(rows.lengths)
        depth = geometry.depth(max(longest - 1, 0))
        if cache is not None:
            # hooks bring in a pooler's parameters for the length of its forward
            by_kernel = runs_kernels(self, self.config, key) and not (
                self.pooler._forward_pre_hooks or "forward" in vars(self.pooler)
            )
            by = (build_nodes_by_kernel, pack_by_kernel) if by_kernel else ()
            levels = cache.layers[self.layer_idx].append(key, value, rows, width, self.pooler, *by)
        else:
            pooler = self.pooler if sampled is None else partial(self.pooler, detach=True)
            levels = build_levels(key, value, pooler, geometry.branching, depth)
        positions = longest if geometry.top_k is None else geometry.top_capacity
        result = recsa_attention(
            query,
            levels,
            rows.starts,
            rows.counts,
            geometry,
            rotary_tables(self.config, query.device, positions),
            scaling=self.scaling,
            dense_attention=self._attend_densely,
            dropout=self.attention_dropout if self.training else 0.0,
            return_selection=self.trace is not None,
            return_weights=output_attentions,
            backend=self.config.recsa_backend,
            training=self.training,
        )
        self.last_backend = result.backend
        if self.trace is not None:
            self.trace.record(self.layer_idx, rows, result)
        output = self.o_proj(rows.scatter(result.output).transpose(1, 2).reshape(batch, width, -1))
        if depth == 0 and sampled is None and self.training and torch.is_grad_enabled():
            output = output + zero_of(self.pooler, key, geometry.branching).to(output.dtype)  # no node was needed
        weights = None
        if result.weights is not None:
            weights = self._weights_by_column(result.weights.to(query.dtype), rows, cache)
        if sampled is None:
            return output, weights
        return output, weights, layer_loss(query, key, self.pooler, self.config, rows.counts, sampled, self.scaling)

    def _attend_densely(self, query, key, value, mask):
        """Dense queries `[S, H, W, D]` through the attention implementation that the user chose."""
        implementation = self.config._attn_implementation
        if implementation.startswith("paged|"):
            raise ValueError(f"attn_implementation={implementation!r}: paged caches cannot hold RecSA's tree.")
        attend = ALL_ATTENTION_FUNCTIONS.get_interface(implementation, eager_attention)
        dropout = self.attention_dropout if self.training else 0.0
        return attend(self, query, key, value, mask, dropout=dropout, scaling=self.scaling)[0].transpose(1, 2)

    def _weights_by_column(self, weights: torch.Tensor, rows: Rows, cache: RecSACache | None) -> torch.Tensor:
        """A over the columns that the caller sees: padding read with weight 0."""
        if rows.column_mask is not None and len(rows.column_mask) != len(rows.starts):
            raise ValueError("output_attentions: not available for packed documents; run them as separate rows.")
        weights = rows.scatter(weights)
        if cache is not None:
            position = cache.layers[self.layer_idx].history.column_positions()
        elif rows.column_mask is None:
            return weights
        else:
            position = torch.where(rows.column_mask, rows.column_mask.cumsum(1) - 1, -1)
        position = position.to(weights.device)[:, None, None, :]
        index = position.clamp(min=0).expand(*weights.shape[:3], -1)
        return torch.where(position >= 0, weights.gather(-1, index), 0)


class RecSAQwen3RMSNorm(Qwen3RMSNorm):
    """Qwen3's RMSNorm; one kernel where the attention runs on kernels too and no gradient is wanted."""

    def __init__(self, width: int, config: RecSAQwen3Config):
        super().__init__(width, eps=config.rms_norm_eps)
        self.config = config

    def forward(self, hidden_states: torch.Tensor) -> torch.Tensor:
        if runs_kernels(self, self.config, hidden_states) and hidden_states.dtype == self.weight.dtype:
            return rms_norm(hidden_states, self.weight, self.variance_epsilon)
        # under autocast a float32 weight would leave queries and keys in float32 beside values in bfloat16
        return super().forward(hidden_states).to(hidden_states.dtype)


class RecSAQwen3DecoderLayer(GradientCheckpointingLayer):
    """Qwen3's decoder layer around `RecSAQwen3Attention`."""

    def __init__(self, config: RecSAQwen3Config, layer_idx: int):
        super().__init__()
        self.hidden_size = config.hidden_size
        self.self_attn = RecSAQwen3Attention(config, layer_idx)
        self.mlp = Qwen3MLP(config)
        self.input_layernorm = RecSAQwen3RMSNorm(config.hidden_size, config)
        self.post_attention_layernorm = RecSAQwen3RMSNorm(config.hidden_size, config)

    def forward(
        self,
        hidden_states: torch.Tensor,
        rows: Rows | None = None,
        cache: RecSACache | None = None,
        output_attentions: bool = False,
        step: "DecodingStep | None" = None,
        sampled: SampledQueries | None = None,
        **kwargs,
    ) -> tuple[torch.Tensor | None, ...]:
        """`[B, T, hidden]` to the same shape, and the rest as `RecSAQwen3Attention.forward`."""
        if step is not None and step.runs_layers:
            return step.run_layer(self, hidden_states), None
        attended, *rest = self.self_attn(
            self.input_layernorm(hidden_states), rows, cache, output_attentions, step, sampled
        )
        hidden_states = hidden_states + attended
        return hidden_states + self.mlp(self.post_attention_layernorm(hidden_states)), *rest


class RecSAQwen3PreTrainedModel(PreTrainedModel):
    config_class = RecSAQwen3Config
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules = ["RecSAQwen3DecoderLayer"]
    _skip_keys_device_placement = ["cache", "past_key_values"]
    _supports_sdpa = True
    _supports_flash_attn = False
    _supports_flex_attn = False
    _supports_attention_backend = True
    _can_compile_fullgraph = False

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, RecSAPooler):
            # through transformers' functions, which leave loaded parameters alone
            init.zeros_(module.query)
            init.zeros_(module.slot_bias)
            eye = torch.eye(module.proj.shape[-1], dtype=module.proj.dtype, device=module.proj.device)
            init.copy_(module.proj, eye.expand_as(module.proj))

    @property
    def last_backend(self) -> str | None:
        """What ran in the last forward, over all chunks: "dense" and / or "reference" or "triton"; `None` before."""
        base: Any = getattr(self, self.base_model_prefix, self)
        return "+".join(sorted(base.backends)) or None


class RecSAQwen3Model(RecSAQwen3PreTrainedModel):
    """The decoder without a head. Weights have exactly Qwen3's names, plus `layers.{i}.self_attn.pooler.*`."""

    def __init__(self, config: RecSAQwen3Config):
        super().__init__(config)
        config.check_recsa()  # fields given at load are set after the configuration was made
        self.branching = config.recsa_branching
        self._checked_config: dict[str, Any] = {}
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList(RecSAQwen3DecoderLayer(config, i) for i in range(config.num_hidden_layers))
        self.norm = RecSAQwen3RMSNorm(config.hidden_size, config)
        self.gradient_checkpointing = False
        self.backends: set[str] = set()  # what ran in the last forward
        self.post_init()

    # lengths are Python integers on this path, so a compiled forward would be compiled anew at every step
    @torch.compiler.disable
    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecSACache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        past_key_values: RecSACache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        prefill_chunk_size: int | None = None,
        hidden_to_keep: int = 0,
        distill: bool = False,
        head_learns: bool = False,
        answer_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> RecSAModelOutputWithPast:
        """Runs the decoder.

        Args:
            input_ids: `[B, T]`; or `inputs_embeds` `[B, T, hidden]`.
            attention_mask: `[B, cached columns + T]`, 0 at padding (either side), or `None`.
            position_ids: `[B, T]`; checked for order; a restart at 0 begins a packed document.
            cache: a `RecSACache`; also accepted as `past_key_values`.
            use_cache: whether a cache is made and returned; the configuration's value where `None`, but not in
                training.
            output_attentions: also returns the token-level matrices A `[B, H, T, N]`; for short inputs.
            output_hidden_states: also returns all hidden states.
            prefill_chunk_size: tokens per chunk, `config.recsa_prefill_chunk` where `None`; with a cache and without
                gradients.
            hidden_to_keep: returns only the last n hidden states; 0 = all.
            distill: in training, and where `recsa_distill_weight` is not 0, also returns the distillation loss.
            head_learns: whether what reads the states learns from them; they are then those of evaluation.
            answer_mask: `[B, T]`, the tokens that the strategy "answers" distils the poolers by; read with `distill`.

        Raises:
            ValueError, TypeError: inputs that cannot be honoured; the message names the argument and the fix.
        """
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("Pass exactly one of input_ids or inputs_embeds.")
        if cache is not None and past_key_values is not None:
            raise ValueError("cache and past_key_values are two names of one argument; pass one of them.")
        cache = cache if cache is not None else past_key_values
        self._check_config()
        self._check_cache(cache)
        output_attentions = self.config.output_attentions if output_attentions is None else output_attentions
        if output_hidden_states is None:
            output_hidden_states = self.config.output_hidden_states
        if not (prefill_chunk_size is None or (type(prefill_chunk_size) is int and prefill_chunk_size >= 1)):
            raise ValueError(f"prefill_chunk_size={prefill_chunk_size!r}: must be an int >= 1.")
        recomputes = self.gradient_checkpointing and self.training and torch.is_grad_enabled()
        if recomputes and cache is not None and cache.get_seq_length():
            raise ValueError(
                "cache: a filled cache cannot be read under gradient checkpointing; switch one of them off."
            )
        distill = distill and self.config.recsa_distill_weight > 0 and self.training and torch.is_grad_enabled()
        if distill and cache is not None and cache.get_seq_length():
            raise ValueError("cache: poolers are distilled on whole sequences; pass no filled cache in training.")
        if (recomputes or distill) and (cache is not None or use_cache):
            what = "under gradient checkpointing" if recomputes else "while poolers are distilled"
            logger.warning_once(f"use_cache: a cache cannot be filled {what}; it is left out.")
            cache, use_cache = None, False
        if use_cache is None:
            use_cache = self.config.use_cache and not (self.training and torch.is_grad_enabled())

        source = input_ids if input_ids is not None else inputs_embeds
        assert source is not None  # for type checkers
        batch, width = source.shape[:2]
        if width == 0 or batch == 0:
            raise ValueError("input_ids: no new tokens; pass at least one.")
        if kwargs.get("seq_idx") is not None and position_ids is None and kwargs.get("cu_seq_lens_q") is None:
            raise ValueError(
                "seq_idx: packed documents are read from position_ids or cu_seq_lens_q; pass one of them."
            )
        trace: RecSATrace | None = self.layers[0].self_attn.trace  # type: ignore[assignment]
        inside = bool(output_attentions or output_hidden_states or trace is not None)
        history = cache.history if cache is not None else None
        pending = PendingRows(batch, width, attention_mask, position_ids, kwargs.get("cu_seq_lens_q"), history)
        embedded = replayed = None
        if width == 1 and cache is not None and cache.step is not None:
            # the device computes the token while the host reads which rows it belongs to; `_step` says if it counts
            embedded = source if input_ids is None else self.embed_tokens(source)
            replayed = self._replay(embedded, cache) if self._takes_step(embedded, cache, inside) else None
        rows = pending.read()
        packed = len(rows.starts) != batch
        if packed and cache is not None:
            raise ValueError("position_ids: packed documents cannot be kept in a cache; pass cache=None.")
        if use_cache and cache is None and not packed:
            cache = RecSACache(self.config)
            self._check_cache(cache)

        sampled = None
        if distill:
            sampled = self._sample_queries(rows, answer_mask, (batch, width), inputs_embeds, head_learns)
            if sampled.frozen and output_attentions:
                raise ValueError(
                    "output_attentions: where poolers alone learn, attention is their dense teacher's, without "
                    "matrices; ask in evaluation (model.eval())."
                )
        chunk = prefill_chunk_size or self.config.recsa_prefill_chunk
        in_chunks = (
            cache is not None and not torch.is_grad_enabled() and not (output_attentions or output_hidden_states)
        )
        parts = rows.split(chunk) if in_chunks and width > chunk else [(slice(0, width), rows)]
        if cache is not None and width > 1:
            self._make_room(cache, rows, chunk)
        kept: list[torch.Tensor] = []
        distill_loss = None
        self.backends = set()
        columns = cache.get_seq_length() if cache is not None else 0
        try:
            for part, part_rows in reading(parts, batch, self.embed_tokens.weight.device):
                if trace is not None:
                    trace.begin()
                if embedded is not None:
                    states = embedded
                else:
                    states = source[:, part] if input_ids is None else self.embed_tokens(source[:, part])
                all_states = all_weights = stepped = None
                one_each = part_rows.is_whole and part_rows.width == 1
                if one_each and (replayed is not None or self._takes_step(states, cache, inside)):
                    stepped = self._step(states, part_rows, cache, replayed)
                if stepped is not None:
                    states = stepped
                else:
                    states, all_states, all_weights, distill_loss = self._run(
                        states, part_rows, cache, output_attentions, output_hidden_states, sampled=sampled
                    )
                kept.append(states)
                if hidden_to_keep:
                    kept = [torch.cat(kept, 1)[:, -hidden_to_keep:]]
                columns += part.stop - part.start
        except BaseException:
            if cache is not None:
                cache.roll_back(columns)  # to whole chunks, which stay usable
            raise
        return RecSAModelOutputWithPast(
            last_hidden_state=torch.cat(kept, 1) if len(kept) > 1 else kept[0],
            hidden_states=all_states,
            attentions=all_weights,
            distill_loss=distill_loss,
            **{CACHE_FIELD: cache if use_cache else None},
        )

    def _sample_queries(
        self, rows: Rows, answer_mask, shape: tuple[int, int], inputs_embeds, learning: bool
    ) -> SampledQueries:
        """At which queries this forward distils the poolers, and whether it trains them alone."""
        if answer_mask is not None and tuple(answer_mask.shape) != shape:
            raise ValueError(f"answer_mask: shape {tuple(answer_mask.shape)}, expected {shape} as input_ids.")
        config = self.config
        shares = draw_queries(
            rows, config.recsa_distill_queries, config.recsa_distill_samples, self.branching, answer_mask
        )
        # under "module" wrappers (adapters, FSDP) the poolers' parameters are still theirs
        poolers = {id(p) for module in self.modules() if isinstance(module, RecSAPooler) for p in module.parameters()}
        learning |= inputs_embeds is not None and inputs_embeds.requires_grad
        learning |= any(p.requires_grad and id(p) not in poolers for p in self.parameters())
        return SampledQueries(shares, frozen=not learning)

    def _takes_step(self, states, cache, inside: bool) -> bool:
        """Whether a new token a row may go through a `DecodingStep`; not where something asks to see `inside`."""
        return (
            runs_kernels(self, self.config, states)
            and self.config.recsa_cuda_graph
            and cache is not None
            and bool(cache.get_seq_length())
            and not (inside or self.training)
            and self.config.recsa_top_k is not None
            and self.config._attn_implementation == "sdpa"
            and states.dtype == cache.layers[0].dtype
            and states.device == cache.layers[0].device == cache.layers[-1].device
            and not torch.is_autocast_enabled(states.device.type)
            and unsupported(states, cache.geometry, self.config.head_dim, cache.layers[0].packed) is None
            # else an interrupted forward left the layers at different lengths, which appending refuses
            and all(layer.history.lengths == cache.history.lengths for layer in cache.layers)
        )

    def _replay(self, states, cache) -> torch.Tensor | None:
        """The captured step with a new token in each row; `None` where none is captured.

        A step that does not fit is dropped. The cache counts the tokens only when `_step` has found that they are
        meant; until then they lie past its end.
        """
        step = cache.step
        if step is not None and not step.fits(self, cache, *self._read_by_step(states.device)):
            cache.step = step = None
        if step is None or step.graph is None:
            return None
        with launching_on(states.device):
            step.begin(cache.lengths)
            return step.replay(states)

    def _read_by_step(self, device: torch.device) -> tuple[TreeGeometry, tuple[torch.Tensor, torch.Tensor]]:
        geometry = TreeGeometry.from_config(self.config)
        return geometry, rotary_tables(self.config, device, geometry.top_capacity)

    def _step(self, states, rows, cache, stepped: torch.Tensor | None) -> torch.Tensor | None:
        """One token a row: the first time on a storage the kernels run as they are, then as one CUDA graph.

        `stepped` is what `_replay` gave where it ran already. Returns `None` where the model does not consist of plain
        modules.
        """
        stepped = self._replay(states, cache) if stepped is None else stepped
        if stepped is not None and not cache.step.still_right():
            cache.step = stepped = None
        if stepped is None:
            stepped = self._first_steps(states, rows, cache)
        if stepped is None:
            return None
        for cached in cache.layers:
            cached.history.append(rows, 1)
        layer: Any
        for layer in self.layers[: self.config.num_hidden_layers]:
            layer.self_attn.last_backend = "triton"  # also where a graph ran
        self.backends = {"triton"}
        return stepped

    def _first_steps(self, states, rows, cache) -> torch.Tensor | None:
        """The step before it is captured, and the one that captures it; `_replay` has found that it fits."""
        captures = states.device.type == "cuda" and cache.step is not None
        if cache.step is None:
            if not PlainModules.are_all(self, _STEP_MODULES):
                return None
            cache.make_room(max(rows.lengths))
            cache.step = DecodingStep(self, cache, *self._read_by_step(states.device))
        step = cache.step

        def run(states):
            return self._run(states, rows, None, False, False, step)[0]

        with launching_on(states.device):
            step.begin(list(rows.starts))
            if not captures:
                return run(states)
            step.capture(run, states.clone())
            return step.replay(states)

    def _run(self, states, rows, cache, output_attentions, output_hidden_states, step=None, sampled=None):
        """All layers and the last norm over one chunk."""
        all_states, all_weights, losses = [], [], []
        layers: list[Any] = list(self.layers[: self.config.num_hidden_layers])
        options = {"output_attentions": bool(output_attentions), "step": step}
        frozen = sampled is not None and sampled.frozen
        if sampled is not None:
            options["sampled"] = sampled
        if frozen:
            states = states.detach()  # reentrant checkpointing has a hook that makes embeddings ask for gradients
        with self._computed_once(frozen):
            for layer in layers:
                all_states.append(states)
                states, weights, *loss = layer(states, rows=rows, cache=cache, **options)
                all_weights.append(weights)
                losses.extend(loss)
                self.backends.update(layer.self_attn.last_backend.split("+"))
                if not output_hidden_states:
                    all_states.clear()
        states = self.norm(states)
        return (
            states,
            (*all_states, states) if output_hidden_states else None,
            tuple(all_weights) if output_attentions else None,
            torch.stack([loss.to(states.device) for loss in losses]).mean() if losses else None,
        )

    @contextmanager
    def _computed_once(self, frozen: bool) -> Iterator[None]:
        """Without gradient checkpointing where a layer keeps less for its poolers than its input is large.

        The reentrant kind would also lose their gradients, since a frozen layer's input asks for none.
        """
        layers = [m for m in self.modules() if isinstance(m, RecSAQwen3DecoderLayer)] if frozen else []
        before = [layer.gradient_checkpointing for layer in layers]
        for layer in layers:
            layer.gradient_checkpointing = False
        try:
            yield
        finally:
            for layer, recomputes in zip(layers, before, strict=True):
                layer.gradient_checkpointing = recomputes

    def _make_room(self, cache: RecSACache, rows: Rows, chunk: int) -> None:
        """Has the cache allocate once for what is known to come, and refuses what the devices cannot hold."""
        longest = max(rows.lengths)
        room = tokens_to_reserve(longest, cache.expected)
        layers: list[Any] = list(self.layers[: len(cache)])
        is_long = longest > chunk
        # tensor-parallel: each process holds some heads only
        if is_long and layers[0].self_attn.pooler.mesh is None:
            devices = [layer.self_attn.k_proj.weight.device for layer in layers]
            cache.check_room(room, len(rows.starts), self.dtype, devices)
        if is_long or room > longest:
            cache.reserve(room)

    def _check_config(self) -> None:
        """A loaded configuration may have been edited, also within `rope_parameters`; asked at every token."""
        check_backend(self.config.recsa_backend)
        fields = vars(self.config)
        if fields == self._checked_config:
            return
        self.config.check_recsa()
        if self.config.recsa_branching != self.branching:
            raise ValueError(
                f"recsa_branching={self.config.recsa_branching}: the poolers were built for {self.branching}; "
                "set the field before the model is made."
            )
        # lists and dicts can be edited in place
        self._checked_config = {
            name: copy.copy(value) if isinstance(value, (list, dict)) else value for name, value in fields.items()
        }

    def _check_cache(self, cache) -> None:
        if cache is None:
            return
        # by name, since the class of a model loaded as remote code is another object than the installed package's
        if type(cache).__name__ != RecSACache.__name__:
            raise TypeError(
                f"cache: got {type(cache).__name__}, which cannot hold RecSA's tree; pass None, or a "
                "RecSACache(config) (static, offloaded and quantised caches are not supported)."
            )
        if cache.geometry.branching != self.config.recsa_branching or len(cache) != self.config.num_hidden_layers:
            raise ValueError(
                f"cache: built for recsa_branching={cache.geometry.branching} and {len(cache)} layers, the model has "
                f"{self.config.recsa_branching} and {self.config.num_hidden_layers}; make it from this model's config."
            )
        if cache.model is None or cache.model() is not self or not cache.get_seq_length():
            note_model(cache, self)


# What a captured step may consist of: an adapter or a quantised layer may do something else at each call.
_STEP_TYPES: tuple[Any, ...] = (
    RecSAQwen3Model,
    RecSAQwen3DecoderLayer,
    RecSAQwen3Attention,
    RecSAPooler,
    Qwen3MLP,
    RecSAQwen3RMSNorm,
    nn.ModuleList,
    nn.Linear,
    nn.Embedding,
    type(ACT2FN["silu"]),
)
_STEP_MODULES = {kind: kind.forward for kind in _STEP_TYPES}  # as they are here: a class can be patched, too


class RecSAQwen3ForCausalLM(RecSAQwen3PreTrainedModel, GenerationMixin):
    """RecSA-Qwen3 with a language-model head."""

    _tied_weights_keys = {"lm_head.weight": "model.embed_tokens.weight"}
    _tp_plan = {"lm_head": "colwise_gather_output"}

    def __init__(self, config: RecSAQwen3Config):
        super().__init__(config)
        self.model = RecSAQwen3Model(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: RecSACache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        past_key_values: RecSACache | None = None,
        output_attentions: bool | None = None,
        output_hidden_states: bool | None = None,
        prefill_chunk_size: int | None = None,
        answer_mask: torch.Tensor | None = None,
        **kwargs,
    ) -> RecSACausalLMOutputWithPast:
        """Logits, and the loss where `labels` are given.

        In training (`model.train()`, gradients enabled) with `config.recsa_distill_weight` > 0 the loss is that of the
        labels, where given, plus the weight times `distill_loss`, and poolers learn from the latter alone. With
        `num_items_in_batch`, a part of a batch counts by its labels there, too.

        Args:
            labels: `[B, T]`, -100 where ignored; shifted inside.
            answer_mask: `[B, T]` bool, the tokens that are answers to be retrieved from the text before, for the
                strategy "answers" of `config.recsa_distill_queries`; read in training alone.
            logits_to_keep: the last n positions, 0 = all; or an index tensor.
            **kwargs: `num_items_in_batch` for the loss, `cu_seq_lens_q` of packed documents.

        The other arguments are those of `RecSAQwen3Model.forward`.
        """
        last = logits_to_keep if isinstance(logits_to_keep, int) and labels is None else 0
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            cache=cache,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            past_key_values=past_key_values,
            output_attentions=output_attentions,
            output_hidden_states=output_hidden_states,
            prefill_chunk_size=prefill_chunk_size,
            hidden_to_keep=last,
            cu_seq_lens_q=kwargs.pop("cu_seq_lens_q", None),
            seq_idx=kwargs.pop("seq_idx", None),
            distill=True,
            head_learns=any(parameter.requires_grad for parameter in self.lm_head.parameters()),
            answer_mask=answer_mask,
            return_dict=True,
        )
        states = outputs.last_hidden_state
        if isinstance(logits_to_keep, torch.Tensor):
            states = states[:, logits_to_keep]
        elif logits_to_keep:
            states = states[:, -logits_to_keep:]
        logits = self.lm_head(states)
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, vocab_size=self.config.vocab_size, **kwargs)
        distill_loss = outputs.distill_loss
        if distill_loss is not None:
            added = self.config.recsa_distill_weight * distill_loss
            total = kwargs.get("num_items_in_batch")
            if labels is not None and total is not None:  # losses of the parts are summed, not averaged
                added = added * (labels[..., 1:] != -100).sum().to(added.device) / total
            loss = added if loss is None else loss + added.to(loss.device)
        return RecSACausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            distill_loss=distill_loss,
            **{CACHE_FIELD: getattr(outputs, CACHE_FIELD)},
        )

    def _prepare_attention_mask_for_generation(self, inputs_tensor, generation_config, model_kwargs):
        """As inherited for new columns; what a cache holds is known, so a generated pad token stays a token there.

        Newer versions drop a mask of ones and ask again in every round of assisted decoding, whose newest token came
        from the model as well.
        """
        mask = super()._prepare_attention_mask_for_generation(inputs_tensor, generation_config, model_kwargs)
        cache = model_kwargs.get("cache") or model_kwargs.get("past_key_values")
        if type(cache).__name__ == RecSACache.__name__ and len(cache.history.lengths) == len(mask):
            held = cache.history.column_positions()[:, : mask.shape[1]] >= 0
            mask[:, : held.shape[1]] = held
            if generation_config.is_assistant:
                mask[:, held.shape[1] :] = 1
        return mask

    def _prepare_cache_for_generation(
        self, generation_config, model_kwargs, generation_mode, batch_size, max_cache_length, *args, **kwargs
    ):
        """Gives `generate` a `RecSACache`, and takes over its chunked prefill.

        Chunks are cut inside the model's forward, which also knows embeddings and later turns.

        Raises:
            ValueError: a `cache_implementation` that cannot hold the tree, a mask that contradicts the cache or ends
                in padding, or assisted decoding behind a filled cache.
        """
        implementation = generation_config.cache_implementation
        if implementation not in (None, "dynamic"):
            raise ValueError(
                f"cache_implementation={implementation!r}: cannot hold RecSA's tree; leave it out, the RecSACache "
                "grows as needed (static, offloaded and quantised caches are not supported)."
            )
        if generation_config.prefill_chunk_size is not None:
            model_kwargs["prefill_chunk_size"] = generation_config.prefill_chunk_size
            generation_config.prefill_chunk_size = None
        mask = model_kwargs.get("attention_mask")
        if mask is not None and mask.dim() == 2 and not bool(mask[:, -1:].all()):
            raise ValueError(
                "attention_mask: a row ends in padding, and generate() would go on behind it; pad on the left "
                "(tokenizer.padding_side = 'left')."
            )
        for name in ("cache", "past_key_values"):  # both names work, whichever the installed version uses
            if name != CACHE_FIELD and model_kwargs.get(name) is not None:
                if model_kwargs.get(CACHE_FIELD) is not None:
                    raise ValueError("cache and past_key_values are two names of one argument; pass one of them.")
                model_kwargs[CACHE_FIELD] = model_kwargs.pop(name)
        given = model_kwargs.get(CACHE_FIELD)
        if given is not None:
            self.model._check_cache(given)
            if given.get_seq_length() and generation_mode == GenerationMode.ASSISTED_GENERATION:
                raise ValueError(
                    "cache: assisted and prompt-lookup decoding feed the whole prompt, so they cannot go on behind a "
                    "filled cache; leave the cache out, or decode without assistance."
                )
            # newer versions pass None for a mask of ones; a mask of another width is refused by forward
            if mask is None or mask.dim() == 2 and mask.shape[1] >= given.get_seq_length():
                given.history.check_mask(mask)
            told = generation_config.cache_config or {}
            if told.get("dtype", given.cache_dtype) != given.cache_dtype:
                raise ValueError(
                    f"cache_config: dtype={told['dtype']!r}, the cache that was passed has {given.cache_dtype!r}; "
                    "leave one of them out."
                )
            given._is_user_defined = True
        elif generation_config.use_cache is not False:
            given = model_kwargs[CACHE_FIELD] = self._make_cache(generation_config.cache_config)
        if given is not None:
            given.expected = max_cache_length + 1

    def _make_cache(self, options: dict[str, Any] | None) -> RecSACache:
        """A cache with the `cache_config` of a generation configuration."""
        options = dict(options or {})
        unknown = sorted(set(options) - {"dtype", "gpu_budget"})
        if unknown:
            raise ValueError(f"cache_config: {', '.join(unknown)}: a RecSACache takes 'dtype' and 'gpu_budget'.")
        return RecSACache(self.config, **options)

    def prepare_inputs_for_generation(self, input_ids, next_sequence_length=None, inputs_embeds=None, **kwargs):
        """As inherited, but refuses a history without a new token: it would be fed again behind itself.

        Raises:
            ValueError: names the columns given and those in the cache.
        """
        if next_sequence_length is not None and next_sequence_length < 1:
            cached = kwargs[CACHE_FIELD].get_seq_length()
            raise ValueError(
                f"input_ids: {cached + next_sequence_length} columns given, but the cache already holds {cached}; "
                "pass the whole history with at least one new token behind it, or crop the cache."
            )
        return super().prepare_inputs_for_generation(
            input_ids, next_sequence_length=next_sequence_length, inputs_embeds=inputs_embeds, **kwargs
        )


# generate() asks a remote-code model for it at every token, and finding it behind the decorators takes long.
RecSAQwen3ForCausalLM.forward.__signature__ = inspect.signature(RecSAQwen3ForCausalLM.forward)


class RecSAQwen3ForSequenceClassification(RecSAQwen3PreTrainedModel):
    """One label per row, read from the last token that is not padding."""

    def __init__(self, config: RecSAQwen3Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = RecSAQwen3Model(config)
        self.score = nn.Linear(config.hidden_size, config.num_labels, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> SequenceClassifierOutputWithPast:
        """Logits `[B, num_labels]`, and the loss where `labels` `[B]` are given.

        Raises:
            ValueError: a batch of several rows with neither an `attention_mask` nor a `pad_token_id`.
        """
        outputs = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **{**kwargs, "return_dict": True}
        )
        states = outputs.last_hidden_state
        last = self._last_token(input_ids, attention_mask, states)
        logits = self.score(states)[torch.arange(len(states), device=states.device), last]
        loss = None
        if labels is not None:
            loss = self.loss_function(logits=logits, labels=labels, pooled_logits=logits, config=self.config)
        return SequenceClassifierOutputWithPast(
            loss=loss,
            logits=logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
            **{CACHE_FIELD: getattr(outputs, CACHE_FIELD)},
        )

    def _last_token(self, input_ids, attention_mask, states) -> torch.Tensor:
        batch, width = states.shape[:2]
        if attention_mask is not None:
            tokens = attention_mask[:, -width:].ne(0)
        elif input_ids is not None and self.config.pad_token_id is not None:
            tokens = input_ids.ne(self.config.pad_token_id)
        elif batch == 1 or input_ids is None:
            return torch.full((batch,), width - 1, device=states.device)
        else:
            raise ValueError(
                "pad_token_id: is None; set config.pad_token_id or pass an attention_mask for a batch > 1."
            )
        column = torch.arange(width, device=tokens.device)
        return (column * tokens).argmax(-1).to(states.device)


class RecSAQwen3ForTokenClassification(RecSAQwen3PreTrainedModel):
    """One label per token."""

    def __init__(self, config: RecSAQwen3Config):
        super().__init__(config)
        self.num_labels = config.num_labels
        self.model = RecSAQwen3Model(config)
        dropout = getattr(config, "classifier_dropout", None)
        dropout = getattr(config, "hidden_dropout", None) if dropout is None else dropout
        self.dropout = nn.Dropout(0.1 if dropout is None else dropout)
        self.score = nn.Linear(config.hidden_size, config.num_labels)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        **kwargs,
    ) -> TokenClassifierOutput:
        """Logits `[B, T, num_labels]`, and the loss where `labels` `[B, T]` are given."""
        outputs = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **{**kwargs, "return_dict": True}
        )
        logits = self.score(self.dropout(outputs.last_hidden_state))
        loss = self.loss_function(logits, labels, self.config) if labels is not None else None
        return TokenClassifierOutput(
            loss=loss, logits=logits, hidden_states=outputs.hidden_states, attentions=outputs.attentions
        )


class RecSAQwen3ForQuestionAnswering(RecSAQwen3PreTrainedModel):
    """Start and end of an answer span. The decoder is called `model` here as in the other heads. [our decision]"""

    def __init__(self, config: RecSAQwen3Config):
        super().__init__(config)
        self.model = RecSAQwen3Model(config)
        self.qa_outputs = nn.Linear(config.hidden_size, 2)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        inputs_embeds: torch.Tensor | None = None,
        start_positions: torch.LongTensor | None = None,
        end_positions: torch.LongTensor | None = None,
        **kwargs,
    ) -> QuestionAnsweringModelOutput:
        """Start and end logits `[B, T]`, and the loss where both positions `[B]` are given."""
        outputs = self.model(
            input_ids, attention_mask, position_ids, inputs_embeds=inputs_embeds, **{**kwargs, "return_dict": True}
        )
        start_logits, end_logits = (
            part.squeeze(-1) for part in self.qa_outputs(outputs.last_hidden_state).split(1, -1)
        )
        loss = None
        if start_positions is not None and end_positions is not None:
            loss = self.loss_function(start_logits, end_logits, start_positions, end_positions)
        return QuestionAnsweringModelOutput(
            loss=loss,
            start_logits=start_logits,
            end_logits=end_logits,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )


RecSAQwen3Model.register_for_auto_class("AutoModel")
RecSAQwen3ForCausalLM.register_for_auto_class("AutoModelForCausalLM")
RecSAQwen3ForSequenceClassification.register_for_auto_class("AutoModelForSequenceClassification")
RecSAQwen3ForTokenClassification.register_for_auto_class("AutoModelForTokenClassification")
RecSAQwen3ForQuestionAnswering.register_for_auto_class("AutoModelForQuestionAnswering")

__all__ = [
    "RecSACache",
    "RecSAQwen3Config",
    "RecSAQwen3ForCausalLM",
    "RecSAQwen3ForQuestionAnswering",
    "RecSAQwen3ForSequenceClassification",
    "RecSAQwen3ForTokenClassification",
    "RecSAQwen3Model",
    "RecSAQwen3PreTrainedModel",
    "needle_recall",
    "recsa_trace",
]

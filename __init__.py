"""RecSA-Qwen3: Recursive Sparse Attention for Qwen3 in Hugging Face Transformers."""

from transformers import (
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    AutoModelForQuestionAnswering,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
)

from .attention_recsa_qwen3 import recsa_attention
from .cache_recsa_qwen3 import RecSACache
from .configuration_recsa_qwen3 import RecSAQwen3Config
from .modeling_recsa_qwen3 import (
    RecSAQwen3ForCausalLM,
    RecSAQwen3ForQuestionAnswering,
    RecSAQwen3ForSequenceClassification,
    RecSAQwen3ForTokenClassification,
    RecSAQwen3Model,
    RecSAQwen3PreTrainedModel,
)
from .recall_recsa_qwen3 import Recall, needle_recall
from .trace_recsa_qwen3 import RecSATrace, recsa_trace
from .tree_recsa_qwen3 import Levels, RecSAPooler, TreeGeometry, build_levels

# With the package imported, the Auto classes work without `trust_remote_code`.
AutoConfig.register("recsa_qwen3", RecSAQwen3Config, exist_ok=True)
AutoModel.register(RecSAQwen3Config, RecSAQwen3Model, exist_ok=True)
AutoModelForCausalLM.register(RecSAQwen3Config, RecSAQwen3ForCausalLM, exist_ok=True)
AutoModelForSequenceClassification.register(RecSAQwen3Config, RecSAQwen3ForSequenceClassification, exist_ok=True)
AutoModelForTokenClassification.register(RecSAQwen3Config, RecSAQwen3ForTokenClassification, exist_ok=True)
AutoModelForQuestionAnswering.register(RecSAQwen3Config, RecSAQwen3ForQuestionAnswering, exist_ok=True)

__all__ = [
    "Levels",
    "Recall",
    "RecSACache",
    "RecSAPooler",
    "RecSAQwen3Config",
    "RecSAQwen3ForCausalLM",
    "RecSAQwen3ForQuestionAnswering",
    "RecSAQwen3ForSequenceClassification",
    "RecSAQwen3ForTokenClassification",
    "RecSAQwen3Model",
    "RecSAQwen3PreTrainedModel",
    "RecSATrace",
    "TreeGeometry",
    "build_levels",
    "needle_recall",
    "recsa_attention",
    "recsa_trace",
]

"""transformers' own common tests of a causal language model, run on RecSA-Qwen3 at every supported version.

The tests are not part of this repository: `python tests/common/fetch.py` (part of `make test`) fetches those of the
installed version, and everything here is skipped until then. Each test runs on two models: one whose dense limit M is
smaller than the tests' inputs of seven tokens, and one with the default M. With RECSA_COMMON_STOCK=1 stock Qwen3 runs
too, which tells a fault of ours from one of the harness or the machine.
"""

import inspect
import os
import sys
import unittest
from pathlib import Path
from unittest import mock

import pytest
import torch
import transformers
from transformers.models.auto import modeling_auto

sys.path.insert(0, str(Path(__file__).resolve().parent))

import fetch  # noqa: E402

if not fetch.is_fetched():
    pytest.skip("fetch them first: python tests/common/fetch.py", allow_module_level=True)
# on the path rather than in sys.modules, so that the processes of distributed tests find them too
sys.path.insert(0, str(fetch.source_dir()))

from transformers_tests import test_tensor_parallel_mixin as tensor_parallel  # noqa: E402
from transformers_tests.generation.test_utils import GenerationTesterMixin  # noqa: E402
from transformers_tests.test_configuration_common import ConfigTester  # noqa: E402
from transformers_tests.test_modeling_common import ModelTesterMixin  # noqa: E402
from transformers_tests.test_tensor_parallel_mixin import TensorParallelTesterMixin  # noqa: E402
from transformers_tests.test_training_mixin import TrainingTesterMixin  # noqa: E402

import recsa_qwen3  # noqa: E402

# Tests that stock Qwen3 passes and that cannot apply here, and why. Others skip themselves for both: they need another
# kind of model (several modalities, experts, an encoder), an accelerator, or a package such as flash-attn, deepspeed.
# Two mixins are left out whole, as the distribution lacks what they need: that of pipelines (tiny checkpoints from the
# Hub) and that of exporters (a RecSA forward keeps lengths as Python integers and cannot become one graph).
SKIPPED = {
    "test_bc_cache_name_forward": "passes a DynamicCache, which cannot hold the tree and is refused by name",
    "test_can_capture_specific_layers_hidden_states": "asks for transformers' capture hooks; the forward collects "
    "hidden states itself and returns all",
    "test_capture_outputs_decorator": "asks for transformers' capture hooks; the forward collects what was asked for",
    "test_model_rope_scaling_frequencies": "asks for a rotary module; stock Qwen3's own makes the tables on demand",
    "test_model_rope_scaling_from_config_1_dynamic": "frequencies that follow the prompt's length are refused by "
    "name, as a later token would change what an earlier query selected",
    "test_sliding_window_mask": "a sliding window is refused by name: it and the selection would both decide what a "
    "query reads",
}

HEADS = {
    "base_model_class": ("Model", "MODEL_MAPPING_NAMES"),
    "causal_lm_class": ("ForCausalLM", "MODEL_FOR_CAUSAL_LM_MAPPING_NAMES"),
    "sequence_classification_class": (
        "ForSequenceClassification",
        "MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES",
    ),
    "token_classification_class": ("ForTokenClassification", "MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES"),
    "question_answering_class": ("ForQuestionAnswering", "MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES"),
}


class ModelTester:
    """What the common tests ask of a model: its classes, a tiny configuration and inputs with padding on the right."""

    batch_size, seq_length, hidden_size, num_hidden_layers, num_attention_heads = 5, 7, 32, 2, 4
    is_training, num_labels = True, 3

    def __init__(self, library, prefix: str, **recsa):
        self.config_class = getattr(library, f"{prefix}Config")
        for attribute, (suffix, _) in HEADS.items():
            setattr(self, attribute, getattr(library, prefix + suffix))
        self.recsa = recsa

    def get_config(self):
        return self.config_class(
            vocab_size=99,
            hidden_size=self.hidden_size,
            intermediate_size=36,
            num_hidden_layers=self.num_hidden_layers,
            num_attention_heads=self.num_attention_heads,
            num_key_value_heads=2,
            head_dim=8,
            max_position_embeddings=512,
            num_labels=self.num_labels,
            pad_token_id=0,
            bos_token_id=1,
            eos_token_id=2,
            **self.recsa,
        )

    def prepare_config_and_inputs_for_common(self):
        config = self.get_config()
        input_ids = torch.randint(3, config.vocab_size, (self.batch_size, self.seq_length))
        lengths = torch.arange(self.seq_length, self.seq_length - self.batch_size, -1)
        attention_mask = (torch.arange(self.seq_length) < lengths[:, None]).long()
        return config, {"input_ids": input_ids, "attention_mask": attention_mask}


class CommonTests(ModelTesterMixin, GenerationTesterMixin):
    """The mixins of models and generation over one model."""

    library, prefix, recsa = recsa_qwen3, "RecSAQwen3", {}
    model_tester = None

    @classmethod
    def setUpClass(cls):
        # the mixins choose labels by the class names that transformers' auto classes know
        patches = [
            mock.patch.dict(getattr(modeling_auto, names), {"under_test": cls.prefix + suffix})
            for suffix, names in HEADS.values()
        ]
        patches.append(mock.patch.object(tensor_parallel, "TP_DISTRIBUTED_TEST_MODEL_TYPES", None))  # None = all
        for patch in patches:
            patch.start()
            cls.addClassCleanup(patch.stop)

    def setUp(self):
        super().setUp()
        for name, reason in SKIPPED.items():
            if self._testMethodName.startswith(name):
                self.skipTest(reason)
        self.model_tester = ModelTester(self.library, self.prefix, **self.recsa)
        self.all_model_classes = tuple(getattr(self.model_tester, attribute) for attribute in HEADS)

    def test_can_init_all_missing_weights(self):
        # skips models from before 2023, by the copyright line of the configuration's file: ours has none
        getfile, ours = inspect.getfile, self.model_tester.config_class
        with mock.patch("inspect.getfile", lambda a: getfile(transformers.Qwen3Config if a is ours else a)):
            super().test_can_init_all_missing_weights()

    def _prepare_config_and_inputs_for_retain_grad_hidden_states_attentions(self):
        # with padding the attentions are laid out by column, as a copy that the output does not depend on
        config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
        return config, {"input_ids": inputs["input_ids"]}

    def test_config(self):
        ConfigTester(self, config_class=self.model_tester.config_class).run_common_tests()


class SparseTest(CommonTests, TrainingTesterMixin, TensorParallelTesterMixin, unittest.TestCase):
    """M = 4: the last tokens of each input go through the tree. Also trains it and splits it over two processes."""

    recsa = {"recsa_branching": 2, "recsa_top_k": 2, "recsa_recent": 0, "recsa_top_capacity": 4}
    training_overfit_seq_length, training_overfit_steps = 32, 200


class DenseTest(CommonTests, unittest.TestCase):
    """The default M: every input is read densely."""


if os.environ.get("RECSA_COMMON_STOCK"):

    class StockTest(CommonTests, TrainingTesterMixin, TensorParallelTesterMixin, unittest.TestCase):
        """Stock Qwen3 under the same harness."""

        library, prefix = transformers, "Qwen3"

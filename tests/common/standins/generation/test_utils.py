"""Stands in for transformers' generation tests, which its source distribution lacks.

The tests bear the names of the originals and ask for the same behaviour, in our own words. The originals about static,
quantised and offloaded caches and about compilation have no counterpart: those are refused by name, which
tests/test_generate.py checks.
"""

import copy
import dataclasses

import torch
from parameterized import parameterized
from transformers import GenerationConfig, GenerationMixin
from transformers.generation import GenerateBeamDecoderOnlyOutput, GenerateDecoderOnlyOutput
from transformers.testing_utils import set_model_for_less_flaky_test

CACHE_FIELD = (
    "cache" if "cache" in {f.name for f in dataclasses.fields(GenerateDecoderOnlyOutput)} else "past_key_values"
)
BEAMS = {"num_beams": 3, "length_penalty": 2.0, "early_stopping": False}
SAMPLE = {"do_sample": True, "top_k": 10, "top_p": 0.7, "temperature": 0.7}
SCORES = {"return_dict_in_generate": True, "output_scores": True}
EVERYTHING = {**SCORES, "output_logits": True, "output_attentions": True, "output_hidden_states": True}


class GenerationTesterMixin:
    """Needs `model_tester`, `all_generative_model_classes` and unittest's assertions."""

    max_new_tokens = 3

    def _models(self, **config_changes):
        """(model, input ids `[2, T]`) of each class that generates, in eval mode, with an end token never met."""
        for model_class in self.all_generative_model_classes:
            config, inputs = self.model_tester.prepare_config_and_inputs_for_common()
            config.eos_token_id = None
            for name, value in config_changes.items():
                setattr(config, name, value)
            model = model_class(copy.deepcopy(config)).eval()
            set_model_for_less_flaky_test(model)
            yield model, inputs["input_ids"][:2]

    def _generate(self, model, ids=None, **kwargs):
        torch.manual_seed(0)
        return model.generate(ids, **{"max_new_tokens": self.max_new_tokens, "do_sample": False, **kwargs})

    def _check_everything(self, model, output, prompt: int, sequences: int, use_cache: bool) -> None:
        """Number and shapes of scores, logits, attentions and hidden states, one entry per forward."""
        heads, layers = model.config.num_attention_heads, model.config.num_hidden_layers
        self.assertEqual(len(output.scores), self.max_new_tokens)
        self.assertTrue(all(s.shape == (sequences, model.config.vocab_size) for s in output.scores + output.logits))
        self.assertEqual(len(output.attentions), self.max_new_tokens)
        for step, (attentions, states) in enumerate(zip(output.attentions, output.hidden_states, strict=True)):
            tokens = prompt + step
            width = 1 if use_cache and step else tokens
            self.assertEqual(len(attentions), layers)
            self.assertTrue(all(a.shape == (sequences, heads, width, tokens) for a in attentions))
            self.assertEqual(len(states), layers + 1)
            self.assertTrue(all(s.shape == (sequences, width, model.config.hidden_size) for s in states))
        cache = getattr(output, CACHE_FIELD)
        if use_cache:
            self._check_cache(model, cache, sequences, prompt + self.max_new_tokens - 1)
        else:
            self.assertIsNone(cache)

    def _check_cache(self, model, cache, sequences: int, tokens: int) -> None:
        shape = (sequences, model.config.num_key_value_heads, tokens, model.config.head_dim)
        self.assertEqual(cache.get_seq_length(), tokens)
        self.assertEqual(len(cache), model.config.num_hidden_layers)
        self.assertTrue(all(layer.keys.shape == layer.values.shape == shape for layer in cache.layers))

    def _check_dict_output(self, kind, use_cache: bool, **kwargs) -> None:
        for model, ids in self._models(_attn_implementation="eager"):
            sequences = len(ids) * max(kwargs.get("num_beams", 1), kwargs.get("num_return_sequences", 1))
            output = self._generate(model, ids, use_cache=use_cache, **EVERYTHING, **kwargs)
            self.assertIsInstance(output, kind)
            self.assertEqual(output.sequences.shape[1], ids.shape[1] + self.max_new_tokens)
            self._check_everything(model, output, ids.shape[1], sequences, use_cache)
            plain = self._generate(model, ids, use_cache=use_cache, **kwargs)
            self.assertTrue(torch.equal(plain, output.sequences))

    def _assert_same(self, first, second) -> None:
        """Equal tokens, or, where rows part, equal scores where they do: a near-tie."""
        self.assertEqual(first.sequences.shape, second.sequences.shape)
        for row in range(len(first.sequences)):
            differs = (first.sequences[row] != second.sequences[row]).nonzero()
            if len(differs):
                step = int(differs[0]) - first.sequences.shape[1]
                torch.testing.assert_close(first.scores[step][row], second.scores[step][row], atol=1e-5, rtol=1e-5)

    def test_inherits_generation_mixin(self):
        for model, _ in self._models():
            self.assertIn(GenerationMixin, type(model).__mro__)

    @parameterized.expand(
        [("greedy", {}), ("sample", SAMPLE), ("beam_search", BEAMS), ("beam_sample", {**BEAMS, **SAMPLE})]
    )
    def test_generate(self, _, kwargs):
        for model, ids in self._models():
            for sequences in {1, kwargs.get("num_beams", 1)}:
                tokens = self._generate(model, ids, num_return_sequences=sequences, **kwargs)
                self.assertEqual(tokens.shape, (2 * sequences, ids.shape[1] + self.max_new_tokens))
                self.assertTrue(torch.equal(tokens[::sequences, : ids.shape[1]], ids))

    @parameterized.expand([("", False), ("_use_cache", True)])
    def test_greedy_generate_dict_outputs(self, _, use_cache):
        self._check_dict_output(GenerateDecoderOnlyOutput, use_cache)

    def test_sample_generate_dict_output(self):
        self._check_dict_output(GenerateDecoderOnlyOutput, True, num_return_sequences=2, **SAMPLE)

    @parameterized.expand([("", False), ("_use_cache", True)])
    def test_beam_search_generate_dict_outputs(self, _, use_cache):
        self._check_dict_output(GenerateBeamDecoderOnlyOutput, use_cache, num_return_sequences=2, **BEAMS)

    def test_beam_sample_generate_dict_output(self):
        self._check_dict_output(GenerateBeamDecoderOnlyOutput, True, **BEAMS, **SAMPLE)

    def test_generate_without_input_ids(self):
        for model, _ in self._models():
            tokens = self._generate(model, bos_token_id=model.config.bos_token_id)
            self.assertEqual(tokens.shape, (1, 1 + self.max_new_tokens))

    def test_cache_changes_nothing(self):
        """Ours: with and without a cache, the greedy tokens and the scores."""
        for model, ids in self._models():
            with_cache, without = (
                self._generate(model, ids, use_cache=use, max_new_tokens=12, **SCORES) for use in (True, False)
            )
            self._assert_same(with_cache, without)

    @parameterized.expand([("random",), ("same",)])
    def test_assisted_decoding_matches_greedy_search(self, assistant):
        for model, ids in self._models():
            helper = model if assistant == "same" else type(model)(copy.deepcopy(model.config)).eval()
            helper.generation_config.num_assistant_tokens = 2
            helper.generation_config.num_assistant_tokens_schedule = "constant"
            self._check_candidates(model, ids[:1], {"assistant_model": helper})

    def test_prompt_lookup_decoding_matches_greedy_search(self):
        for model, ids in self._models():
            self._check_candidates(model, ids[:1].repeat(1, 2), {"prompt_lookup_num_tokens": 2})

    def _check_candidates(self, model, ids, source: dict) -> None:
        plain, with_candidates = (
            self._generate(model, ids, max_new_tokens=8, output_hidden_states=True, **SCORES, **extra)
            for extra in ({}, source)
        )
        self._assert_same(plain, with_candidates)

    def test_assisted_decoding_sample(self):
        for model, ids in self._models():
            tokens = self._generate(model, ids[:1], assistant_model=copy.deepcopy(model), do_sample=True)
            self.assertEqual(tokens.shape[1], ids.shape[1] + self.max_new_tokens)

    def test_prompt_lookup_decoding_stops_at_eos(self):
        for model, ids in self._models():
            prompt = ids[:1].repeat(1, 2)
            end = int(self._generate(model, prompt, max_new_tokens=8)[0, prompt.shape[1] + 2])
            settings = {"max_new_tokens": 8, "eos_token_id": end, "pad_token_id": 0}
            expected = self._generate(model, prompt, **settings)
            self.assertEqual(int(expected[0, -1]), end)
            looked_up = self._generate(model, prompt, prompt_lookup_num_tokens=3, **settings)
            self.assertTrue(torch.equal(looked_up, expected))

    def test_left_padding_compatibility(self):
        for model, ids in self._models():
            padded = torch.cat((torch.zeros(2, 5, dtype=torch.long), ids), 1)
            mask = padded.ne(0).long()
            with torch.no_grad():
                bare, logits = model(ids).logits, model(padded, attention_mask=mask).logits[:, 5:]
            torch.testing.assert_close(logits, bare, atol=1e-5, rtol=1e-5)
            with_padding = self._generate(model, padded, attention_mask=mask, **SCORES)
            with_padding.sequences = with_padding.sequences[:, 5:]
            self._assert_same(self._generate(model, ids, **SCORES), with_padding)

    def test_padding_matches_padding_free_with_position_ids(self):
        for model, ids in self._models():
            mask = torch.ones_like(ids)
            mask[1, -3:] = 0
            position_ids = torch.arange(ids.shape[1]).expand_as(ids)[mask.bool()][None]
            with torch.no_grad():
                padded = model(ids, attention_mask=mask, use_cache=False).logits[mask.bool()]
                packed = model(ids[mask.bool()][None], position_ids=position_ids, use_cache=False).logits[0]
            torch.testing.assert_close(padded, packed, atol=1e-5, rtol=1e-5)

    def test_generate_with_and_without_position_ids(self):
        for model, ids in self._models():
            position_ids = torch.arange(ids.shape[1]).expand_as(ids)
            given = self._generate(model, ids, position_ids=position_ids, **SCORES)
            self._assert_same(self._generate(model, ids, **SCORES), given)

    def test_past_key_values_format(self):
        for model, ids in self._models(use_cache=True):
            self._check_cache(model, getattr(model(ids), CACHE_FIELD), *ids.shape)

    @parameterized.expand([("greedy", {}), ("beam_search", BEAMS)])
    def test_generate_from_inputs_embeds(self, _, kwargs):
        settings = {**SCORES, **kwargs}
        for model, ids in self._models():
            embeds = model.get_input_embeddings()(ids)
            from_ids = self._generate(model, ids, **settings)
            with_both = self._generate(model, ids, inputs_embeds=embeds, **settings)
            self._assert_same(from_ids, with_both)
            other = self._generate(model, ids, inputs_embeds=torch.rand_like(embeds), **settings)
            self.assertFalse(torch.equal(from_ids.scores[0], other.scores[0]))
            alone = self._generate(model, inputs_embeds=embeds, **settings)
            alone.sequences = torch.cat((from_ids.sequences[:, : ids.shape[1]], alone.sequences), 1)
            self._assert_same(from_ids, alone)

    def test_generate_from_random_inputs_embeds(self):
        for model, ids in self._models():
            tokens = self._generate(model, inputs_embeds=torch.rand(2, ids.shape[1], model.config.hidden_size))
            self.assertEqual(tokens.shape, (2, self.max_new_tokens))

    def test_generate_continue_from_past_key_values(self):
        for model, ids in self._models():
            whole = self._generate(model, ids, max_new_tokens=4, **SCORES)
            first = self._generate(model, ids, max_new_tokens=3, **SCORES)
            second = self._generate(
                model,
                first.sequences,
                # given, since generate would take a pad token among the generated ones for padding
                attention_mask=torch.ones_like(first.sequences),
                max_new_tokens=1,
                **{CACHE_FIELD: getattr(first, CACHE_FIELD)},
                **SCORES,
            )
            second.scores = first.scores + second.scores
            self._assert_same(whole, second)
            caches = getattr(whole, CACHE_FIELD), getattr(second, CACHE_FIELD)
            for one, other in zip(*(cache.layers for cache in caches), strict=True):
                torch.testing.assert_close(one.keys, other.keys, atol=1e-5, rtol=1e-5)

    def test_generate_continue_from_inputs_embeds(self):
        for model, ids in self._models():
            embed = model.get_input_embeddings()
            whole = self._generate(model, inputs_embeds=embed(ids), max_new_tokens=4, **SCORES)
            first = self._generate(model, inputs_embeds=embed(ids), max_new_tokens=3, **SCORES)
            second = self._generate(
                model,
                inputs_embeds=torch.cat((embed(ids), embed(first.sequences)), 1),
                max_new_tokens=1,
                **{CACHE_FIELD: getattr(first, CACHE_FIELD)},
                **SCORES,
            )
            second.sequences = torch.cat((first.sequences, second.sequences), 1)
            second.scores = first.scores + second.scores
            self._assert_same(whole, second)

    def test_generate_methods_with_logits_to_keep(self):
        for model, ids in self._models():
            expected = self._generate(model, ids)
            self.assertTrue(torch.equal(self._generate(model, ids, logits_to_keep=0), expected))

    def test_eager_matches_sdpa_generate(self):
        for model, ids in self._models():
            outputs = []
            for implementation in ("eager", "sdpa"):
                model.set_attn_implementation(implementation)
                outputs.append(self._generate(model, ids, **SCORES))
            self._assert_same(*outputs)

    def test_prepare_inputs_for_generation_kwargs_forwards(self):
        for model, ids in self._models():
            self.assertIs(model.prepare_inputs_for_generation(ids, is_first_iteration=True, extra=ids)["extra"], ids)

    def test_unused_model_kwargs_are_refused(self):
        for model, ids in self._models():
            with self.assertRaises(ValueError):
                self._generate(model, ids, no_such_argument=1)

    def test_chunked_prefill(self):
        for model, ids in self._models():
            in_chunks = self._generate(model, ids, prefill_chunk_size=2, **SCORES)
            self._assert_same(self._generate(model, ids, **SCORES), in_chunks)

    def test_generation_config_is_saved(self):
        for model, _ in self._models():
            self.assertIsInstance(model.generation_config, GenerationConfig)

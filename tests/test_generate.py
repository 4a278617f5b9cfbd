"""`generate` and its relatives on RecSA-Qwen3: with and without a cache, assisted, batched, compiled, in a pipeline.

Turns and chunked prefill are in test_generate_turns.py, refused caches in test_generate_refusals.py, beams in
test_cache.py. Models are float64 wherever two paths
must agree, so that no near-tie of a selection can make a test flaky.
"""

import copy

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import (
    LogitsProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
    pipeline,
)
from transformers.generation.streamers import BaseStreamer

from conftest import DENSE, LOGITS_ATOL, TINY, random_ids, tiny_model
from recsa_qwen3 import RecSACache, RecSAQwen3ForCausalLM, recsa_trace
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

torch.set_num_threads(1)

# Below the dense length to the last new token, across it, from one above it, and at more than four times it.
PROMPTS = [DENSE - 10, DENSE - 2, DENSE + 1, 4 * DENSE + 3]
NEW = 10


@pytest.fixture(scope="module")
def double() -> RecSAQwen3ForCausalLM:
    """TINY in float64."""
    return tiny_model().double()


def left_padded(lengths: list[int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Random rows of these lengths, `[B, longest]`, and their mask."""
    width = max(lengths)
    mask = torch.arange(width) >= width - torch.tensor(lengths)[:, None]
    return torch.where(mask, random_ids(len(lengths), width), TINY["pad_token_id"]), mask.long()


def backend_for(tokens: int) -> str:
    """What the last query of a row of so many tokens must have run."""
    return "dense" if tokens <= DENSE else "reference"


# ---- with and without a cache ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("prompt", PROMPTS)
def test_greedy(double, prompt):
    """Every new token is the best one of a whole forward over what stands before it."""
    ids = random_ids(1, prompt)
    out = double.generate(ids, max_new_tokens=NEW, do_sample=False)
    assert double.last_backend == backend_for(prompt + NEW - 1)
    assert torch.equal(out, double.generate(ids, max_new_tokens=NEW, do_sample=False, use_cache=False))
    with torch.no_grad():
        best = double(out, use_cache=False).logits.argmax(-1)
    assert torch.equal(out[:, prompt:], best[:, prompt - 1 : -1])


@pytest.mark.parametrize("prompt", PROMPTS)
def test_seeded_sampling(double, prompt):
    """The same draws with and without a cache; warpers included."""
    ids, seed = random_ids(2, prompt), int(torch.randint(1 << 30, ()))
    options = dict(max_new_tokens=NEW, do_sample=True, temperature=1.5, top_k=50, top_p=0.95, repetition_penalty=1.1)
    sampled = []
    for use_cache in (True, False):
        torch.manual_seed(seed)
        sampled.append(double.generate(ids, use_cache=use_cache, **options))
    assert torch.equal(*sampled)


@pytest.mark.parametrize("capacity, prompt, new", [(DENSE, DENSE - 10, 10), (64, 24, 40), (64, 63, 1)])
def test_stock_qwen3_generates_the_same_up_to_the_dense_length(capacity, prompt, new):
    """LD-05: the same weights in stock Qwen3, greedy and beams; beyond M the two part."""
    model = tiny_model(recsa_top_capacity=capacity).double()
    fields = {name: value for name, value in TINY.items() if not name.startswith("recsa_")}
    stock = Qwen3ForCausalLM(Qwen3Config(**fields)).double().eval()
    report = stock.load_state_dict(model.state_dict(), strict=False)
    assert not report.missing_keys and all(".pooler." in name for name in report.unexpected_keys)
    ids = random_ids(2, prompt)
    for options in (dict(), dict(num_beams=3)):
        options = dict(max_new_tokens=new, do_sample=False, **options)
        assert torch.equal(model.generate(ids, **options), stock.generate(ids, **options))
        assert model.last_backend == "dense"
    ids = random_ids(1, 4 * capacity)
    with torch.no_grad():
        gap = (model(ids).logits - stock(ids).logits).abs().amax((0, 2))
    assert gap[:capacity].max() < LOGITS_ATOL < gap[-1] and model.last_backend == "dense+reference"


def test_a_second_call_without_a_cache_gives_the_same_answer(double):
    """CA-04: no state is left on modules or on the generation configuration."""
    ids, other = random_ids(1, 70), random_ids(1, 90)
    before = double.generation_config.to_dict()
    names = {name: sorted(vars(module)) for name, module in double.named_modules()}
    options = dict(max_new_tokens=NEW, do_sample=False, prefill_chunk_size=16)
    first = double.generate(ids, **options)
    double.generate(other, **options)
    assert torch.equal(first, double.generate(ids, **options))
    assert double.generation_config.to_dict() == before
    assert {name: sorted(vars(module)) for name, module in double.named_modules()} == names


def test_streamer_receives_the_prompt_and_each_token(double):
    class Collector(BaseStreamer):
        def __init__(self):
            self.parts, self.ended = [], False

        def put(self, value):
            self.parts.append(value.flatten().tolist())

        def end(self):
            self.ended = True

    ids, streamer = random_ids(1, 4 * DENSE), Collector()
    out = double.generate(ids, max_new_tokens=NEW, do_sample=False, streamer=streamer)
    assert streamer.ended and [token for part in streamer.parts for token in part] == out[0].tolist()
    assert streamer.parts[0] == ids[0].tolist() and all(len(part) == 1 for part in streamer.parts[1:])


# ---- what generate returns ------------------------------------------------------------------------------------------


def test_attentions_and_hidden_states_of_generate(double):
    """One entry per step and layer: rows of A sum to 1 over the columns seen, padding is read with weight 0."""
    ids, mask = left_padded([70, 30])
    out = double.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=4,
        do_sample=False,
        return_dict_in_generate=True,
        output_attentions=True,
        output_hidden_states=True,
        output_logits=True,
    )
    assert torch.equal(out.sequences, double.generate(ids, attention_mask=mask, max_new_tokens=4, do_sample=False))
    assert len(out.attentions) == len(out.hidden_states) == len(out.logits) == 4
    heads, layers = TINY["num_attention_heads"], TINY["num_hidden_layers"]
    for step, (attentions, states) in enumerate(zip(out.attentions, out.hidden_states, strict=True)):
        queries, columns = (70, 70) if step == 0 else (1, 70 + step)
        assert len(attentions) == layers and len(states) == layers + 1
        for matrix in attentions:
            assert matrix.shape == (2, heads, queries, columns)
            total = matrix.sum(-1)
            torch.testing.assert_close(total[:, :, -1], torch.ones_like(total[:, :, -1]))
            assert not matrix[1, :, -1, :40].any() and bool((matrix[:, :, -1, -1] > 0).all())
        assert all(state.shape == (2, queries, TINY["hidden_size"]) for state in states)
        logits = double.lm_head(states[-1][:, -1])
        torch.testing.assert_close(logits.float(), out.logits[step].float(), rtol=0, atol=LOGITS_ATOL)
    assert isinstance(getattr(out, CACHE_FIELD), RecSACache)


def test_scores_and_logits_processors(double):
    """Raw logits equal those of a whole forward; a processor's bans are kept, with and without a cache."""

    class BanEven(LogitsProcessor):
        def __call__(self, input_ids, scores):
            scores = scores.clone()
            scores[:, ::2] = float("-inf")
            return scores

    ids, results = random_ids(2, 4 * DENSE + 1), []
    for use_cache in (True, False):
        results.append(
            double.generate(
                ids,
                max_new_tokens=NEW,
                do_sample=False,
                use_cache=use_cache,
                logits_processor=[BanEven()],
                no_repeat_ngram_size=2,
                return_dict_in_generate=True,
                output_scores=True,
                output_logits=True,
            )
        )
    cached, plain = results
    assert torch.equal(cached.sequences, plain.sequences)
    assert bool((cached.sequences[:, ids.shape[1] :] % 2 == 1).all())
    with torch.no_grad():
        whole = double(cached.sequences, use_cache=False).logits
    for step in range(NEW):
        expected = whole[:, ids.shape[1] - 1 + step].float()
        torch.testing.assert_close(cached.logits[step].float(), expected, rtol=0, atol=LOGITS_ATOL)
        assert bool(torch.isneginf(cached.scores[step][:, ::2]).all())
    assert getattr(plain, CACHE_FIELD) is None


# ---- assisted decoding (CA-03) --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def assistants(double) -> dict[str, RecSAQwen3ForCausalLM]:
    """One layer with other weights (mostly rejected), and the model itself (mostly accepted)."""
    itself = copy.deepcopy(double)
    itself.generation_config.assistant_confidence_threshold = 0.0  # else it stops drafting where it is unsure
    return {"one layer": tiny_model(num_hidden_layers=1, seed=5).double(), "itself": itself}


@pytest.mark.parametrize("draft", ["lookup 3", "lookup 10", "one layer", "itself"])
@pytest.mark.parametrize("returns_cache", [False, True])
def test_assisted_decoding_equals_greedy(double, assistants, draft, returns_cache):
    """CA-03: a repetitive prompt of 150 tokens, 80 new; drafts that are rejected leave no trace."""
    phrase = random_ids(1, 25)
    ids = phrase.repeat(1, 6)
    kind, _, number = draft.partition(" ")
    if kind == "lookup":
        options = dict(prompt_lookup_num_tokens=int(number))
    else:
        options = dict(assistant_model=assistants[draft])
    plain = double.generate(ids, max_new_tokens=80, do_sample=False)
    steps = []
    handle = double.model.register_forward_hook(lambda *_: steps.append(1))
    try:
        out = double.generate(
            ids, max_new_tokens=80, do_sample=False, return_dict_in_generate=returns_cache, **options
        )
    finally:
        handle.remove()
    assert "reference" in double.last_backend
    assert torch.equal(out.sequences if returns_cache else out, plain)
    assert len(steps) < 60 if draft == "itself" else len(steps) <= 80
    if returns_cache:  # what was rolled back serves a further turn
        cache, turn = getattr(out, CACHE_FIELD), torch.cat((plain, random_ids(1, 9)), 1)
        assert cache.get_seq_length() in (plain.shape[1] - 1, plain.shape[1])
        options = dict(attention_mask=torch.ones_like(turn), max_new_tokens=NEW, do_sample=False)
        more = double.generate(turn, **{CACHE_FIELD: cache}, **options)
        assert torch.equal(more, double.generate(turn, **options))


@pytest.mark.parametrize("draft", ["lookup 3", "one layer", "itself"])
def test_assisted_decoding_that_generates_the_pad_id(double, assistants, draft):
    """CA-03: every token generated is in turn the id of padding; newer versions infer a mask in every round."""
    ids = random_ids(1, 70)
    plain = double.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None)
    options = dict(prompt_lookup_num_tokens=3) if draft == "lookup 3" else dict(assistant_model=assistants[draft])
    for pad in set(plain[0, ids.shape[1] :].tolist()) - set(ids[0].tolist()):
        out = double.generate(ids, max_new_tokens=16, do_sample=False, eos_token_id=None, pad_token_id=pad, **options)
        assert torch.equal(out, plain)


@pytest.mark.parametrize("draft", ["lookup", "one layer"])
def test_assisted_decoding_of_several_rows_is_refused(double, assistants, draft):
    """CA-03: an error rather than a wrong answer."""
    options = dict(prompt_lookup_num_tokens=3) if draft == "lookup" else dict(assistant_model=assistants[draft])
    with pytest.raises(ValueError, match="batch_size"):
        double.generate(random_ids(2, 70), max_new_tokens=NEW, do_sample=False, **options)


# ---- batches (CA-10) ------------------------------------------------------------------------------------------------

ROWS = [3, 20, 66, 131]


def test_left_padded_rows_equal_single_runs(double):
    """CA-10: tokens and, at prefill and at every decode step, the nodes read by each row."""
    ids, mask = left_padded(ROWS)
    options = dict(max_new_tokens=40, do_sample=False)
    with recsa_trace(double) as together:
        out = double.generate(ids, attention_mask=mask, **options)
    for row, length in enumerate(ROWS):
        with recsa_trace(double) as alone:
            single = double.generate(ids[row : row + 1, -length:], **options)
        assert torch.equal(out[row, -length - 40 :], single[0])
        assert len(together.forwards) == len(alone.forwards) == 40
        for batch_step, single_step in zip(together.forwards, alone.forwards, strict=True):
            for layer, record in batch_step.items():
                for level, nodes in record.selection.items():
                    expected = single_step[layer].selection.get(level)
                    own = nodes[row, :, -length:] if nodes.shape[2] > 1 else nodes[row]
                    if expected is None:
                        assert bool((own == -1).all())
                    else:
                        assert torch.equal(own, expected[0])
                    assert bool((nodes[row, :, : nodes.shape[2] - own.shape[1]] == -1).all())  # padding reads nothing
    assert any(record.selection for record in together.forwards[-1].values())


def test_right_padded_rows_equal_single_runs(double):
    """CA-10: logits at the tokens of right-padded rows, with a cache and without."""
    width = max(ROWS)
    mask = torch.arange(width) < torch.tensor(ROWS)[:, None]
    ids = torch.where(mask, random_ids(4, width), TINY["pad_token_id"])
    with torch.no_grad():
        for use_cache in (True, False):
            logits = double(ids, attention_mask=mask.long(), use_cache=use_cache).logits
            for row, length in enumerate(ROWS):
                single = double(ids[row : row + 1, :length], use_cache=False).logits[0]
                torch.testing.assert_close(logits[row, :length], single, rtol=0, atol=LOGITS_ATOL)
    assert double.last_backend == "dense+reference"


def test_batches_in_bfloat16_report_their_agreement():
    """CA-10: in bfloat16 the share of equal tokens is printed, since rounding depends on shapes."""
    model = tiny_model().bfloat16()
    ids, mask = left_padded(ROWS)
    options = dict(max_new_tokens=40, do_sample=False)
    out = model.generate(ids, attention_mask=mask, output_logits=True, return_dict_in_generate=True, **options)
    assert all(bool(logits.isfinite().all()) for logits in out.logits)
    equal = [
        (out.sequences[row, -40:] == model.generate(ids[row : row + 1, -length:], **options)[0, -40:])
        for row, length in enumerate(ROWS)
    ]
    print("bfloat16 agreement by row:", [round(float(tokens.float().mean()), 3) for tokens in equal])
    assert out.sequences.shape == (4, max(ROWS) + 40)


# ---- torch.compile (TK-05) ------------------------------------------------------------------------------------------


class CountingBackend:
    """The eager backend, counting compilations."""

    def __init__(self):
        self.compilations = 0

    def __call__(self, graph, inputs):
        self.compilations += 1
        return graph.forward


@pytest.fixture
def fresh_dynamo():
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()


@pytest.mark.parametrize("start", [2 * DENSE - 20, 4 * DENSE - 20])
def test_compiled_decoding_does_not_recompile(double, fresh_dynamo, start):
    """TK-05: 40 steps over block borders compile at most three times after two steps of warm-up; same tokens."""
    ids, backend = random_ids(1, start), CountingBackend()
    compiled = torch.compile(double, backend=backend)
    expected = double.generate(ids, max_new_tokens=43, do_sample=False)
    cache, tokens, warm = RecSACache(double.config), ids, 0
    with torch.no_grad():
        for step in range(43):
            new = tokens if step == 0 else tokens[:, -1:]
            logits = compiled(new, cache=cache, logits_to_keep=1).logits
            tokens = torch.cat((tokens, logits[:, -1].argmax(-1)[:, None]), 1)
            if step == 2:
                warm = backend.compilations
    assert torch.equal(tokens, expected) and "reference" in double.last_backend
    assert 1 <= warm and backend.compilations - warm <= 3, (warm, backend.compilations)
    print("compilations in warm-up and after:", warm, backend.compilations - warm)


def test_generate_with_a_compiled_forward(fresh_dynamo):
    """TK-05: `model.forward = torch.compile(model.forward)`, the way generate is usually sped up."""
    model = tiny_model().double()
    ids = random_ids(1, 2 * DENSE)
    expected = model.generate(ids, max_new_tokens=40, do_sample=False)
    backend = CountingBackend()
    model.forward = torch.compile(model.forward, backend=backend)
    assert torch.equal(model.generate(ids, max_new_tokens=40, do_sample=False), expected)
    assert 1 <= backend.compilations <= 8


def test_compiled_training_step(fresh_dynamo):
    """TK-05: loss and every gradient as without compilation."""
    plain, other = tiny_model().double().train(), tiny_model().double().train()
    compiled = torch.compile(other, backend="eager")
    for length in (DENSE, 4 * DENSE + 1):
        ids = random_ids(2, length)
        expected, loss = plain(ids, labels=ids).loss, compiled(ids, labels=ids).loss
        torch.testing.assert_close(loss, expected)
        expected.backward()
        loss.backward()
    for (name, one), (_, two) in zip(plain.named_parameters(), other.named_parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, msg=name)


# ---- pipeline -------------------------------------------------------------------------------------------------------


def word_tokenizer() -> PreTrainedTokenizerFast:
    """Words w2 ... w319 as the ids of the same number."""
    vocabulary = {"<pad>": 0, "<bos>": 1, **{f"w{i}": i for i in range(2, TINY["vocab_size"])}}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<pad>"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, pad_token="<pad>", bos_token="<bos>", padding_side="left"
    )


def test_text_generation_pipeline(double):
    """One text, and a batch of texts of different lengths, as `generate` would continue them."""
    generator = pipeline("text-generation", model=double, tokenizer=word_tokenizer())
    ids = [random_ids(length) for length in (70, 9, 33)]
    texts = [" ".join(f"w{token}" for token in row.tolist()) for row in ids]
    options = dict(max_new_tokens=NEW, do_sample=False)
    expected = []
    for row in ids:
        tokens = double.generate(row[None], **options)[0, len(row) :].tolist()
        expected.append([{0: "<pad>", 1: "<bos>"}.get(token, f"w{token}") for token in tokens])

    def continuation(result) -> list[str]:
        return result[0]["generated_text"].split()

    settings = dict(return_full_text=False, skip_special_tokens=False, **options)
    assert continuation(generator(texts[0], **settings)) == expected[0]
    batched = generator(texts, batch_size=3, **settings)
    assert [continuation(result) for result in batched] == expected

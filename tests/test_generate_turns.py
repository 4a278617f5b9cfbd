"""`generate` turn by turn on one cache, and prefill in chunks: both must change nothing but the time taken.

Models are float64 wherever two paths must agree, so that no near-tie of a selection can make a test flaky.
"""

import pytest
import torch

from conftest import DENSE, LOGITS_ATOL, TINY, random_ids, tiny_model
from recsa_qwen3 import RecSACache, RecSAQwen3ForCausalLM, recsa_trace
from recsa_qwen3.modeling_recsa_qwen3 import CACHE_FIELD

torch.set_num_threads(1)

TURNS = (37, 5, 64, 1)
NEW = 11
GREEDY = dict(max_new_tokens=NEW, do_sample=False)


@pytest.fixture(scope="module")
def double() -> RecSAQwen3ForCausalLM:
    """TINY in float64."""
    return tiny_model().double()


def cache_of(output) -> RecSACache:
    """The cache of an output, under the name that the installed transformers gives it."""
    return getattr(output, CACHE_FIELD)


def run_turn(model, ids, cache, as_embeds=False, **options) -> tuple[torch.Tensor, RecSACache]:
    """One turn over the whole history; returns the new tokens and the cache."""
    inputs = dict(inputs_embeds=model.model.embed_tokens(ids)) if as_embeds else dict(input_ids=ids)
    options.setdefault("attention_mask", torch.ones_like(ids))
    if cache is not None:
        options[CACHE_FIELD] = cache
    out = model.generate(**inputs, **GREEDY, return_dict_in_generate=True, **options)
    return out.sequences[:, -NEW:], cache_of(out)


def fresh_run(model, ids) -> torch.Tensor:
    """The new tokens after `ids`, from nothing.

    The mask is given, since a history may hold the id of padding as a token.
    """
    return model.generate(ids, attention_mask=torch.ones_like(ids), **GREEDY)[:, -NEW:]


# ---- turns (CA-05) --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("embeds", ["never", "first", "each"])
@pytest.mark.parametrize("chunk", [None, 8])
def test_turns_equal_runs_from_scratch(double, embeds, chunk):
    """CA-05: whole history and cache each turn, as ids or embeddings; CA-07: with chunks in every turn."""
    history, cache = random_ids(1, 0), None
    for number, length in enumerate(TURNS):
        history = torch.cat((history, random_ids(1, length)), 1)
        as_embeds = embeds == "each" or (embeds == "first" and number == 0)
        new, cache = run_turn(double, history, cache, as_embeds, prefill_chunk_size=chunk)
        assert torch.equal(new, fresh_run(double, history))
        history = torch.cat((history, new), 1)
        assert cache.get_seq_length() == history.shape[1] - 1
    assert history.shape[1] > 4 * DENSE and double.last_backend in ("reference", "dense+reference")


def test_a_turn_that_only_repeats_the_last_token(double):
    """CA-05: the last answer's final token is the only one that the cache lacks."""
    history = random_ids(1, 70)
    new, cache = run_turn(double, history, None)
    history = torch.cat((history, new), 1)
    new, cache = run_turn(double, history, cache)
    assert torch.equal(new, fresh_run(double, history))
    assert cache.get_seq_length() == history.shape[1] + NEW - 1


def test_a_turn_of_new_ids_with_the_whole_mask(double):
    """CA-05: only the new ids, where the mask covers the history."""
    history = random_ids(1, 70)
    new, cache = run_turn(double, history, None)
    turn = torch.cat((new[:, -1:], random_ids(1, 6)), 1)
    history = torch.cat((history, new[:, :-1], turn), 1)
    again, _ = run_turn(double, turn, cache, attention_mask=torch.ones_like(history))
    assert torch.equal(again, fresh_run(double, history))


@pytest.mark.parametrize("padding", [0, 7])
def test_without_a_mask_the_cache_says_which_columns_are_tokens(double, padding):
    """CA-05: an id of padding that the cache holds as a token stays one, and its padding stays padding."""
    history = random_ids(1, 70)
    pad = int(history[0, 69])
    mask = (torch.arange(70) >= padding).long()[None]
    cache = RecSACache(double.config)
    with torch.no_grad():
        double(history, attention_mask=mask, cache=cache)
    turn = torch.cat((history, torch.where((new := random_ids(1, 9)) == pad, (pad + 1) % 50 + 2, new)), 1)
    again, _ = run_turn(double, turn, cache, attention_mask=None, pad_token_id=pad)
    assert torch.equal(again, fresh_run(double, turn[:, padding:]))


@pytest.mark.parametrize("missing", [0, 1, 30])
@pytest.mark.parametrize("as_embeds", [False, True])
@pytest.mark.parametrize("with_mask", [False, True])
def test_a_history_that_does_not_extend_the_cache_is_refused(double, missing, as_embeds, with_mask):
    """CA-05: nothing new, or less than the cache holds, would otherwise be fed again behind itself."""
    ids, cache = random_ids(1, 70), RecSACache(double.config)
    with torch.no_grad():
        double(ids, cache=cache)
    shorter = ids[:, : 70 - missing]
    options = dict(attention_mask=torch.ones_like(shorter) if with_mask else None)
    with pytest.raises(ValueError, match="cache"):
        run_turn(double, shorter, cache, as_embeds, **options)
    assert cache.get_seq_length() == 70


@pytest.mark.parametrize("prompt, filled", [(DENSE - 2, 9), (DENSE + 1, DENSE), (75, 20), (75, 74)])
def test_a_cache_filled_by_forward(double, prompt, filled):
    """CA-05: a prefix run through forward, then generate over the whole prompt."""
    ids, cache = random_ids(2, prompt), RecSACache(double.config)
    with torch.no_grad():
        double(ids[:, :filled], cache=cache)
    new, returned = run_turn(double, ids, cache)
    assert returned is cache
    assert torch.equal(new, fresh_run(double, ids))


def test_turns_of_a_padded_batch(double):
    """CA-05: each turn pads its rows on the left, so padding lies between turns; each row equals its own run."""
    lengths = [(37, 12), (5, 1), (20, 64), (1, 1)]
    rows = [random_ids(0), random_ids(0)]
    ids = mask = torch.empty(2, 0, dtype=torch.long)
    cache = None
    for turn in lengths:
        width = max(turn)
        new_mask = (torch.arange(width) >= width - torch.tensor(turn)[:, None]).long()
        turn_ids = torch.where(new_mask.bool(), random_ids(2, width), TINY["pad_token_id"])
        ids, mask = torch.cat((ids, turn_ids), 1), torch.cat((mask, new_mask), 1)
        new, cache = run_turn(double, ids, cache, attention_mask=mask)
        for row in range(2):
            rows[row] = torch.cat((rows[row], turn_ids[row][new_mask[row].bool()]))
            assert torch.equal(new[row : row + 1], fresh_run(double, rows[row][None]))
            rows[row] = torch.cat((rows[row], new[row]))
        ids, mask = torch.cat((ids, new), 1), torch.cat((mask, torch.ones_like(new)), 1)
    assert min(len(row) for row in rows) > 4 * DENSE


@pytest.mark.parametrize("turn", [1, 5])
def test_a_mask_that_changed_since_the_last_turn_is_refused(double, turn):
    """CA-05: what was padding cannot become a token later, nor a token padding."""
    ids = random_ids(2, 40)
    mask = (torch.arange(40) >= torch.tensor([0, 15])[:, None]).long()
    new, cache = run_turn(double, ids, None, attention_mask=mask)
    history = torch.cat((ids, new, random_ids(2, turn)), 1)[:, : 50 + turn]
    good = torch.cat((mask, torch.ones(2, 10 + turn, dtype=torch.long)), 1)
    shifted = good.clone()
    shifted[1, :40] = mask[1].flip(0)
    for changed in (torch.ones_like(good), shifted, good.flip(0)):
        with pytest.raises(ValueError, match="attention_mask.*cache"):
            run_turn(double, history, cache, attention_mask=changed)
    assert cache.get_seq_length() == 50
    run_turn(double, history, cache, attention_mask=good)


# ---- chunked prefill (CA-07) ----------------------------------------------------------------------------------------

CHUNKS = [1, 5, 8, 13, 64, 1000]


def padded_pair(width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Two rows, the second padded on the left by about a third."""
    mask = torch.arange(width) >= torch.tensor([0, width // 3])[:, None]
    return torch.where(mask, random_ids(2, width), TINY["pad_token_id"]), mask.long()


@pytest.mark.parametrize("chunk", CHUNKS)
@pytest.mark.parametrize("batch", [1, 2])
@pytest.mark.parametrize("as_embeds", [False, True])
def test_chunked_prefill_equals_one_shot(double, chunk, batch, as_embeds):
    """CA-07: prompt of 150 tokens; tokens, logits of the first step, and the nodes that the last query read."""
    ids, mask = padded_pair(150) if batch == 2 else (random_ids(1, 150), torch.ones(1, 150, dtype=torch.long))
    inputs = dict(inputs_embeds=double.model.embed_tokens(ids)) if as_embeds else dict(input_ids=ids)
    widths, results, traces = [], [], []
    hook = double.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    try:
        for size in (None, chunk):
            widths.clear()
            with recsa_trace(double) as trace:
                results.append(
                    double.generate(
                        **inputs,
                        attention_mask=mask,
                        prefill_chunk_size=size,
                        return_dict_in_generate=True,
                        output_logits=True,
                        **GREEDY,
                    )
                )
            traces.append(trace)
    finally:
        hook.remove()
    prefill = widths[: len(widths) - NEW + 1]
    assert sum(prefill) == 150 and max(prefill) == min(chunk, 150) and len(prefill) == -(-150 // chunk)
    one_shot, chunked = results
    assert torch.equal(one_shot.sequences, chunked.sequences)
    torch.testing.assert_close(one_shot.logits[0].float(), chunked.logits[0].float(), rtol=0, atol=LOGITS_ATOL)
    whole, last = traces[0].forwards[0], traces[1].forwards[len(prefill) - 1]
    for layer, record in whole.items():
        assert record.selection
        for level, nodes in record.selection.items():
            assert torch.equal(nodes[:, :, -1], last[layer].selection[level][:, :, -1])


@pytest.mark.parametrize("chunk", CHUNKS)
def test_chunked_prefill_in_bfloat16_reports_its_agreement(chunk):
    """CA-07: rounding depends on shapes, so the share of equal tokens is printed; a chunk of everything is equal."""
    model = tiny_model().bfloat16()
    for ids, mask in (padded_pair(150), (random_ids(1, 150), torch.ones(1, 150, dtype=torch.long))):
        one_shot, chunked = (
            model.generate(ids, attention_mask=mask, prefill_chunk_size=size, **GREEDY)[:, 150:]
            for size in (None, chunk)
        )
        agreement = float((one_shot == chunked).float().mean())
        print(f"bfloat16, chunks of {chunk}, batch {len(ids)}: {agreement:.3f} of the tokens equal")
        assert agreement == 1 or chunk < 150


def test_long_prompts_are_chunked_without_being_asked(double):
    """CA-07: `config.recsa_prefill_chunk` bounds every chunk of generate and of a cached forward without gradients."""
    model = tiny_model(recsa_prefill_chunk=48).double()
    model.load_state_dict(double.state_dict())
    widths = []
    model.model.layers[0].register_forward_pre_hook(lambda _, args: widths.append(args[0].shape[1]))
    ids = random_ids(1, 150)
    out = model.generate(ids, **GREEDY)
    assert widths == [48, 48, 48, 6] + [1] * (NEW - 1)
    assert torch.equal(out, double.generate(ids, **GREEDY))
    widths.clear()
    model.generate(ids, prefill_chunk_size=100, max_new_tokens=1)
    assert widths == [100, 50]
    widths.clear()
    with torch.no_grad():
        expected = double(ids, use_cache=False).logits
        torch.testing.assert_close(model(ids, use_cache=True).logits, expected, rtol=0, atol=LOGITS_ATOL)
        assert widths == [48, 48, 48, 6]
        widths.clear()
        model(ids, use_cache=False)
        model(ids, output_hidden_states=True)
    model(ids).logits.sum().backward()
    assert widths == [150, 150, 150]  # no cache to fill, states asked for, and gradients: one piece

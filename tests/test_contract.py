"""The contract (METHOD section 3) as a property: what a query selects depends on its row's first tokens alone.

Random rows are run in random chunks, batches and paddings, cached or not, with detours that are cropped away, forward
and recomputed; selections must be equal and logits agree with one plain forward over each row. Everything runs in
float64 throughout, so that no near-tie hides or fakes a difference.
"""

from random import Random

import pytest
import torch
from transformers import DataCollatorWithFlattening
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from conftest import DENSE, random_ids, tiny_model
from recsa_qwen3 import RecSACache, build_levels, recsa_trace

torch.set_num_threads(1)

CLOSE = dict(rtol=1e-9, atol=1e-9)
NARROW = dict(recsa_branching=2, recsa_top_k=3, recsa_recent=0, recsa_top_capacity=13)
PADDINGS = ("left", "right", "both", "holes")
# (t, layer, level) -> the chosen nodes per KV head
Selected = dict[tuple[int, int, int], list[list[int]]]


@pytest.fixture(autouse=True)
def norms_in_float64(monkeypatch):
    """Qwen3's norm casts to float32 inside, which would turn rounding into near-ties."""

    def forward(self, states):
        return self.weight * states * torch.rsqrt(states.square().mean(-1, keepdim=True) + self.variance_epsilon)

    monkeypatch.setattr(Qwen3RMSNorm, "forward", forward)


@pytest.fixture(params=[{}, NARROW], ids=["tiny", "narrow"])
def model(request):
    """TINY, and a narrower tree whose M is no power of r."""
    return tiny_model(**request.param).double()


def rng() -> Random:
    return Random(int(torch.randint(2**31, ())))


def selected(forwards, widths, mask: torch.Tensor, first: int = 0) -> list[Selected]:
    """Per row what its tokens chose in these forwards, which began at column `first`; padding must choose nothing."""
    positions = torch.where(mask, mask.cumsum(1) - 1, -1).tolist()
    rows: list[Selected] = [{} for _ in positions]
    for forward, width in zip(forwards, widths, strict=True):
        for layer, record in forward.items():
            for level, nodes in record.selection.items():
                for b, columns in enumerate(nodes.transpose(1, 2).tolist()):
                    assert len(columns) == width
                    for i, heads in enumerate(columns):
                        t = positions[b][first + i]
                        if heads[0][-1] >= 0:
                            assert t >= 0, "padding chose nodes"
                            rows[b][t, layer, level] = heads
        first += width
    return rows


def alone(model, ids: torch.Tensor) -> tuple[torch.Tensor, Selected]:
    """One plain forward over one row: logits [t, V], and what was chosen, which is something past M only."""
    with torch.no_grad(), recsa_trace(model) as trace:
        logits = model(ids[None], use_cache=False).logits[0]
    (chosen,) = selected(trace.forwards, [len(ids)], torch.ones(1, len(ids), dtype=torch.bool))
    dense = model.config.recsa_top_capacity
    assert {t for t, _, _ in chosen} == set(range(dense, len(ids)))
    return logits, chosen


def draw_mask(draw: Random, lengths: list[int], padding: str) -> torch.Tensor:
    """Where the tokens of rows of these lengths stand, [B, columns] bool."""
    width = max(lengths) + (draw.randint(0, 6) if padding != "none" else 0)
    mask = torch.zeros(len(lengths), width, dtype=torch.bool)
    for row, length in enumerate(lengths):
        if padding == "holes":
            mask[row, draw.sample(range(width), length)] = True
        else:
            left = {"left": width - length, "right": 0, "both": draw.randint(0, width - length)}[padding]
            mask[row, left : left + length] = True
    return mask


def draw_batch(draw: Random, lengths: list[int], padding: str):
    """Rows of random ids, the batch that holds them with random ids at padding too, and its mask."""
    rows, mask = [random_ids(length) for length in lengths], draw_mask(draw, lengths, padding)
    batch = random_ids(*mask.shape)
    for b, row in enumerate(rows):
        batch[b, mask[b]] = row
    return rows, batch, mask


def draw_lengths(draw: Random, dense: int) -> list[int]:
    return [draw.randint(1, dense), dense + 1, draw.randint(4 * dense, 6 * dense)]


def positions_of(mask: torch.Tensor) -> torch.Tensor:
    """Position ids as `generate` makes them from a mask."""
    return (mask.long().cumsum(1) - 1).clamp(min=0)


def check_rows(model, rows, mask, logits, chosen) -> None:
    for b, row in enumerate(rows):
        expected, expected_chosen = alone(model, row)
        torch.testing.assert_close(logits[b, mask[b]], expected, **CLOSE)
        assert chosen[b] == expected_chosen


# ---- chunks, batches, paddings, caches ------------------------------------------------------------------------------


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("positions", [False, True])
def test_padding(model, padding, positions):
    """CA-10: one shot, no cache: each row as if it were alone."""
    draw = rng()
    rows, batch, mask = draw_batch(draw, draw_lengths(draw, model.config.recsa_top_capacity), padding)
    with torch.no_grad(), recsa_trace(model) as trace:
        position_ids = positions_of(mask) if positions else None
        logits = model(batch, attention_mask=mask.long(), position_ids=position_ids, use_cache=False).logits
    check_rows(model, rows, mask, logits, selected(trace.forwards, [batch.shape[1]], mask))


@pytest.mark.parametrize("padding", PADDINGS)
@pytest.mark.parametrize("run", range(2))
def test_chunks_detours_and_decode(model, padding, run):
    """CA-07, CA-09: random chunks (some of them single tokens or padding only), and detours that are cropped away."""
    draw = rng()
    rows, batch, mask = draw_batch(draw, draw_lengths(draw, model.config.recsa_top_capacity), padding)
    total = batch.shape[1]
    cache = RecSACache(model.config)
    logits, chosen = [], [{} for _ in rows]

    def forward(ids, columns, begin):
        position_ids = positions_of(columns)[:, begin:] if run else None
        with torch.no_grad(), recsa_trace(model) as trace:
            out = model(ids, attention_mask=columns.long(), position_ids=position_ids, cache=cache).logits
        return out, selected(trace.forwards, [ids.shape[1]], columns, begin)

    column = 0
    while column < total:
        if draw.random() < 0.3:
            detour = draw.randint(1, 9)
            some = torch.rand(len(rows), detour) < 0.7
            forward(random_ids(len(rows), detour), torch.cat((mask[:, :column], some), 1), column)
            cache.crop(-detour)
        end = min(column + (1 if draw.random() < 0.5 else draw.randint(1, 2 * DENSE)), total)
        out, new = forward(batch[:, column:end], mask[:, :end], column)
        logits.append(out)
        for row, more in zip(chosen, new, strict=True):
            row.update(more)
        column = end
    assert cache.lengths == mask.sum(1).tolist() and cache.get_seq_length() == total
    check_rows(model, rows, mask, torch.cat(logits, 1), chosen)


@pytest.mark.parametrize("padding", ["none", *PADDINGS])
def test_chunked_prefill_inside_forward(model, padding):
    """CA-07: the chunks that forward cuts by itself, of any size, and decoding after them."""
    draw = rng()
    dense = model.config.recsa_top_capacity
    lengths = [5 * dense] * 2 if padding == "none" else draw_lengths(draw, dense)
    if padding == "none":
        rows = [random_ids(length) for length in lengths]
        batch, mask = torch.stack(rows), torch.ones(2, 5 * dense, dtype=torch.bool)
    else:
        rows, batch, mask = draw_batch(draw, lengths, padding)
    prefill, total = batch.shape[1] - 3, batch.shape[1]
    for size in {1, draw.randint(2, 3 * dense), 1000}:
        cache = RecSACache(model.config)
        given = None if padding == "none" else mask.long()
        with torch.no_grad(), recsa_trace(model) as trace:
            first = None if given is None else given[:, :prefill]
            logits = [model(batch[:, :prefill], attention_mask=first, cache=cache, prefill_chunk_size=size).logits]
            for end in range(prefill + 1, total + 1):
                columns = None if given is None else given[:, :end]
                logits.append(model(batch[:, end - 1 : end], attention_mask=columns, cache=cache).logits)
        widths = [min(size, prefill - begin) for begin in range(0, prefill, size)] + [1] * 3
        check_rows(model, rows, mask, torch.cat(logits, 1), selected(trace.forwards, widths, mask))


@pytest.mark.parametrize("padding", PADDINGS)
def test_nodes_in_the_cache(model, padding):
    """CA-09: whatever the chunks, the cache holds the nodes that one look at the whole row builds."""
    draw = rng()
    _, batch, mask = draw_batch(draw, draw_lengths(draw, model.config.recsa_top_capacity), padding)
    whole, parts = RecSACache(model.config), RecSACache(model.config)
    r = model.config.recsa_branching
    with torch.no_grad():
        model(batch, attention_mask=mask.long(), cache=whole)
        column = 0
        while column < batch.shape[1]:
            end = min(column + draw.randint(1, 2 * r + 1), batch.shape[1])
            model(batch[:, column:end], attention_mask=mask[:, :end].long(), cache=parts)
            column = end
        for one, other, layer in zip(whole.layers, parts.layers, model.model.layers, strict=True):
            torch.testing.assert_close(one.keys, other.keys, **CLOSE)
            for b, length in enumerate(parts.lengths):
                tokens = other.keys[b : b + 1, :, :length], other.values[b : b + 1, :, :length]
                depth = len(parts.geometry.node_counts(length)) - 1
                levels = build_levels(*tokens, layer.self_attn.pooler, r, depth)
                for level in range(1, depth + 1):
                    number = length // r**level
                    for stored, built in (
                        (other.node_keys(level), levels.keys[level]),
                        (other.node_values(level), levels.values[level]),
                    ):
                        torch.testing.assert_close(stored[b, :, :number], built[0, :, :number], **CLOSE)


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputed_forward(model, reentrant):
    """TR-01: gradient checkpointing selects the same nodes in both passes, and gives the same gradients."""
    draw = rng()
    rows, batch, mask = draw_batch(draw, draw_lengths(draw, model.config.recsa_top_capacity), "left")
    weights = torch.randn(*batch.shape, model.config.vocab_size, dtype=torch.float64) * mask[..., None]
    model.train()
    grads, passes = [], []
    for checkpointing in (False, True):
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.zero_grad()
        with recsa_trace(model) as trace:
            logits = model(batch, attention_mask=mask.long()).logits
            passes.append(selected(trace.forwards, [batch.shape[1]], mask))
            for record in trace.forwards[0].values():
                record.selection.clear()
            (logits * weights).sum().backward()
        if checkpointing:
            passes.append(selected(trace.forwards, [batch.shape[1]], mask))
        grads.append({name: parameter.grad for name, parameter in model.named_parameters()})
    assert passes[0] == passes[1] == passes[2]
    assert set(grads[0]) == set(grads[1])
    for name, grad in grads[0].items():
        assert grad.norm() > 0, name
        torch.testing.assert_close(grads[1][name], grad, **CLOSE)
    check_rows(model.eval(), rows, mask, logits.detach(), passes[0])


def test_earlier_tokens_alone_decide(model):
    """What comes after a token, and in which batch row it stands, changes neither its logits nor its selection."""
    dense = model.config.recsa_top_capacity
    ids = random_ids(6 * dense)
    expected, chosen = alone(model, ids)
    length = 4 * dense + 3
    batch = torch.stack((random_ids(6 * dense), torch.cat((ids[:length], random_ids(2 * dense - 3)))))
    with torch.no_grad(), recsa_trace(model) as trace:
        logits = model(batch, use_cache=False).logits[1, :length]
    torch.testing.assert_close(logits, expected[:length], **CLOSE)
    (_, found) = selected(trace.forwards, [6 * dense], torch.ones_like(batch, dtype=torch.bool))
    assert {key: nodes for key, nodes in found.items() if key[0] < length} == {
        key: nodes for key, nodes in chosen.items() if key[0] < length
    }


# ---- packed documents -----------------------------------------------------------------------------------------------

DOCUMENTS = (13, 50, 81)


def packed(documents: list[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """ids and restarting position_ids, each [1, T], and cu_seq_lens."""
    lengths = torch.tensor([0, *map(len, documents)])
    positions = torch.cat([torch.arange(len(document)) for document in documents])
    return torch.cat(documents)[None], positions[None], lengths.cumsum(0).int()


@pytest.mark.parametrize("how", ["position_ids", "cu_seq_lens", "both"])
def test_packed_documents_equal_separate_rows(model, how):
    """TR-05: documents of 13, 50 and 81 tokens in one row: logits, selections and gradients of separate rows."""
    documents = [random_ids(length) for length in DOCUMENTS]
    ids, position_ids, cu_seq_lens = packed(documents)
    arguments = {}
    if how != "cu_seq_lens":
        arguments["position_ids"] = position_ids
    if how != "position_ids":
        arguments["cu_seq_lens_q"] = cu_seq_lens
    weights = torch.randn(ids.shape[1], model.config.vocab_size, dtype=torch.float64)
    model.train()
    with recsa_trace(model) as trace:
        logits = model(ids, **arguments).logits[0]
    assert model.last_backend == "dense+reference"
    grads = torch.autograd.grad((logits * weights).sum(), list(model.parameters()))
    separate = [model(document[None]).logits[0] for document in documents]
    expected = torch.autograd.grad((torch.cat(separate) * weights).sum(), list(model.parameters()))
    torch.testing.assert_close(logits, torch.cat(separate), **CLOSE)
    for grad, other in zip(grads, expected, strict=True):
        assert other.norm() > 0
        torch.testing.assert_close(grad, other, **CLOSE)

    found = selected(trace.forwards, [ids.shape[1]], torch.ones_like(ids, dtype=torch.bool))[0]
    first = 0
    for document in documents:
        _, chosen = alone(model.eval(), document)
        last = first + len(document)
        own = {(t - first, *key): nodes for (t, *key), nodes in found.items() if first <= t < last}
        assert own == chosen
        first = last


def test_packed_rows_with_padding(model):
    """TR-05: two packed rows of different documents, one of them padded at its end."""
    rows = [[random_ids(n) for n in (30, 7, 63)], [random_ids(n) for n in (1, 44, 2, 45)]]
    ids, mask = torch.zeros(2, 100, dtype=torch.long), torch.zeros(2, 100, dtype=torch.long)
    positions = torch.zeros(2, 100, dtype=torch.long)
    for b, documents in enumerate(rows):
        row, position, _ = packed(documents)
        ids[b, : row.shape[1]], positions[b, : row.shape[1]], mask[b, : row.shape[1]] = row[0], position[0], 1
    with torch.no_grad():
        logits = model(ids, attention_mask=mask, position_ids=positions).logits
        for b, documents in enumerate(rows):
            expected = torch.cat([model(document[None]).logits[0] for document in documents])
            torch.testing.assert_close(logits[b, : len(expected)], expected, **CLOSE)


def test_documents_do_not_see_each_other(model):
    """TR-05: changing document 1 moves no logit of documents 2 and 3."""
    documents = [random_ids(length) for length in DOCUMENTS]
    ids, position_ids, _ = packed(documents)
    other = torch.cat((random_ids(13), *documents[1:]))[None]
    with torch.no_grad():
        one, two = (model(i, position_ids=position_ids, use_cache=False).logits[0] for i in (ids, other))
    assert not torch.equal(one[:13], two[:13])
    assert torch.equal(one[13:], two[13:])


def test_flattening_collator(model):
    """TR-05: what the flattening collator passes, keyword by keyword; its loss is the mean over separate rows."""
    documents = [random_ids(length) for length in DOCUMENTS]
    collator = DataCollatorWithFlattening(return_flash_attn_kwargs=True)
    batch = collator([{"input_ids": document.tolist()} for document in documents])
    assert "cu_seq_lens_q" in batch
    with torch.no_grad():
        loss = model(**batch).loss
        losses = [model(document[None], labels=document[None]).loss * (len(document) - 1) for document in documents]
    torch.testing.assert_close(loss, sum(losses) / (sum(DOCUMENTS) - 3), rtol=1e-5, atol=0)


def test_packed_inputs_that_are_refused(model):
    """TR-05: packed documents with a cache, gaps in positions, documents marked twice, output_attentions."""
    ids, position_ids, cu_seq_lens = packed([random_ids(length) for length in DOCUMENTS])
    with torch.no_grad():
        for filled in (False, True):
            cache = RecSACache(model.config)
            if filled:
                model(random_ids(1, 5), cache=cache)
            with pytest.raises(ValueError, match="packed documents"):
                model(ids, position_ids=position_ids, cache=cache)
            assert cache.get_seq_length() == 5 * filled
        gaps = position_ids.clone()
        gaps[0, 70:] += 1
        with pytest.raises(ValueError, match="position_ids: .*rise by one"):
            model(ids, position_ids=gaps)
        with pytest.raises(ValueError, match="position_ids: .*rise by one"):
            model(ids, position_ids=torch.arange(144).flip(0)[None])
        with pytest.raises(ValueError, match="position_ids: shape"):
            model(ids, position_ids=position_ids[:, :-1])
        mask = torch.ones_like(ids)
        mask[0, -1] = 0
        with pytest.raises(ValueError, match="cu_seq_lens_q"):
            model(ids, attention_mask=mask, cu_seq_lens_q=cu_seq_lens)
        with pytest.raises(ValueError, match="output_attentions"):
            model(ids, position_ids=position_ids, output_attentions=True, use_cache=False)


def test_positions_may_start_anywhere(model):
    """RoPE is relative: an offset of all positions changes nothing."""
    ids = random_ids(1, 5 * DENSE)
    with torch.no_grad():
        expected = model(ids).logits
        assert torch.equal(model(ids, position_ids=torch.arange(1000, 1000 + ids.shape[1])[None]).logits, expected)
        cache = RecSACache(model.config)
        assert torch.equal(model(ids, position_ids=torch.arange(ids.shape[1])[None], cache=cache).logits, expected)

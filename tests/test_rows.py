"""Sequences of a batch: gathering and scattering, splitting, the history of a cache, and what is refused."""

from random import Random

import pytest
import torch

from operands import rows_of_batch
from recsa_qwen3.rows_recsa_qwen3 import RowHistory, Rows

torch.set_num_threads(1)


def rng() -> Random:
    return Random(int(torch.randint(2**31, ())))


def random_mask(batch: int, width: int) -> torch.Tensor:
    return torch.rand(batch, width) < 0.6


# ---- gather, scatter, split -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", range(5))
def test_gather_puts_tokens_in_order_and_scatter_undoes_it(draw):
    """Padding on either side and between: sequences without padding, zeros where padding was."""
    batch, width = 4, rng().randint(1, 20)
    mask = random_mask(batch, width)
    mask[0], mask[-1] = True, False  # a full row and one without any token
    rows = rows_of_batch(batch, width, mask.long())
    assert rows.starts == (0,) * 4 and rows.counts == tuple(mask.sum(1).tolist())
    assert rows.lengths == rows.counts and rows.width == width
    states = torch.randn(batch, 3, width, 5)
    gathered = rows.gather(states)
    assert gathered.shape == (batch, 3, width, 5) and torch.isfinite(gathered).all()
    for b in range(batch):
        assert torch.equal(gathered[b, :, : rows.counts[b]], states[b][:, mask[b]])
    assert torch.equal(rows.scatter(gathered), states * mask[:, None, :, None])
    poisoned = gathered.clone()
    for b in range(batch):
        poisoned[b, :, rows.counts[b] :] = float("nan")
    assert torch.equal(rows.scatter(poisoned), states * mask[:, None, :, None])


def test_whole_rows_are_not_copied():
    """Where every column is a token nothing is moved, with or without a mask of ones."""
    states = torch.randn(2, 3, 7, 5)
    for mask in (None, torch.ones(2, 7, dtype=torch.long), torch.ones(2, 7)):
        rows = rows_of_batch(2, 7, mask)
        assert rows.is_whole and rows.column_mask is None
        assert rows.gather(states) is states and rows.scatter(states) is states


def test_gradients_pass_through():
    mask = torch.tensor([[0, 1, 1], [1, 0, 1]])
    rows = rows_of_batch(2, 3, mask)
    states = torch.randn(2, 1, 3, 2, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda s: rows.scatter(2 * rows.gather(s)), states)


def test_documents():
    """Restarting positions cut a row into sequences, numbered in the order of their columns."""
    positions = torch.tensor([[0, 1, 2, 0, 1, 0], [0, 0, 1, 2, 3, 4]])
    rows = rows_of_batch(2, 6, position_ids=positions)
    assert rows.counts == (3, 2, 1, 1, 5) and rows.starts == (0,) * 5 and rows.width == 5
    states = torch.arange(12.0).view(2, 1, 6, 1)
    gathered = rows.gather(states)
    assert [gathered[s, 0, :n, 0].tolist() for s, n in enumerate(rows.counts)] == [
        [0, 1, 2],
        [3, 4],
        [5],
        [6],
        [7, 8, 9, 10, 11],
    ]
    assert torch.equal(rows.scatter(gathered), states)
    flat = rows_of_batch(2, 6, cu_seq_lens=torch.tensor([0, 3, 5, 6, 7, 12], dtype=torch.int32))
    assert flat.counts == rows.counts and torch.equal(flat.gather(states), gathered)
    # lengths of whole rows say nothing new
    assert rows_of_batch(2, 6, cu_seq_lens=torch.tensor([0, 6, 12])).is_whole


@pytest.mark.parametrize("draw", range(5))
def test_split(draw):
    """Chunks of columns: each starts where the one before ended, and together they are the whole."""
    batch, width, size = 3, 17, rng().randint(1, 20)
    mask = random_mask(batch, width) if draw else torch.ones(batch, width, dtype=torch.bool)
    history = RowHistory()
    history.append(rows_of_batch(batch, 4), 4)
    seen = torch.cat((torch.ones(batch, 4, dtype=torch.bool), mask), 1)
    rows = rows_of_batch(batch, width, seen.long(), history=history)
    starts, columns = (4,) * batch, 0
    for part, chunk in rows.split(size):
        assert part.start == columns and chunk.starts == starts
        assert chunk.counts == tuple(mask[:, part].sum(1).tolist())
        states = torch.randn(batch, 2, part.stop - part.start, 3)
        assert torch.equal(chunk.scatter(chunk.gather(states)), states * mask[:, None, part, None])
        starts, columns = chunk.lengths, part.stop
    assert columns == width and starts == rows.lengths


# ---- the history of a cache -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("draw", range(10))
def test_history_against_a_mask(draw):
    """Appending, cropping across several forwards and selecting rows, against a plain mask that is cut alike."""
    draw_from = rng()
    history, batch = RowHistory(), 3
    mask = torch.ones(batch, 0, dtype=torch.bool)
    for _ in range(12):
        width = draw_from.randint(1, 6)
        new = random_mask(batch, width) if draw_from.random() < 0.5 else torch.ones(batch, width, dtype=torch.bool)
        mask = torch.cat((mask, new), 1)
        history.append(rows_of_batch(batch, width, mask.long(), history=history), width)
        if draw_from.random() < 0.4:
            removed = draw_from.randint(0, mask.shape[1])
            history.crop(removed)
            mask = mask[:, : mask.shape[1] - removed]
        if draw_from.random() < 0.2:
            order = [draw_from.randrange(batch) for _ in range(batch)]
            history.select(order)
            mask = mask[order]
        assert history.columns == mask.shape[1]
        assert history.lengths == mask.sum(1).tolist()
        assert torch.equal(history.column_positions(), torch.where(mask, mask.cumsum(1) - 1, -1))
    assert history.column_positions().dtype == torch.int64  # LP-04: positions are integers


def test_crop_by_more_than_there_is():
    history = RowHistory()
    history.append(rows_of_batch(2, 5), 5)
    history.crop(99)
    assert history.columns == 0 and history.lengths == [0, 0]


# ---- reading a batch ------------------------------------------------------------------------------------------------


def filled(*masks: list[list[int]]) -> RowHistory:
    history = RowHistory()
    seen = torch.zeros(len(masks[0]), 0, dtype=torch.long)
    for mask in masks:
        seen = torch.cat((seen, torch.tensor(mask)), 1)
        history.append(rows_of_batch(len(mask), len(mask[0]), seen, history=history), len(mask[0]))
    return history


def test_rows_continue_a_cache():
    history = filled([[0, 1, 1], [1, 1, 1]], [[1], [0]])
    rows = rows_of_batch(2, 2, torch.tensor([[0, 1, 1, 1, 0, 1], [1, 1, 1, 0, 1, 1]]), history=history)
    assert rows.starts == (3, 3) and rows.counts == (1, 2)
    rows = rows_of_batch(2, 2, history=history)  # without a mask the new columns are tokens
    assert rows.is_whole and rows.starts == (3, 3) and rows.counts == (2, 2)


def test_positions_of_padding_do_not_matter():
    """Left padding under the position ids of several transformers versions: 0, 1 or a running count at padding."""
    mask = torch.tensor([[0, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    for pads in ([0, 0], [1, 1], [7, 3]):
        positions = torch.tensor([[*pads, 0, 1, 2], [0, 1, 2, 3, 4]])
        rows = rows_of_batch(2, 5, mask, positions)
        assert rows.starts == (0, 0) and rows.counts == (3, 5)
    rows = rows_of_batch(2, 5, mask, torch.arange(5)[None])
    assert rows.counts == (3, 5)


@pytest.mark.parametrize(
    "mask",
    [
        torch.ones(2, 1, 5, 5),
        torch.zeros(2, 1, 5, 5, dtype=torch.bool),
        torch.ones(5),
        {"full_attention": torch.ones(2, 5)},
    ],
    ids=["4D", "4D bool", "1D", "dictionary"],
)
def test_masks_of_another_kind_are_refused(mask):
    with pytest.raises(ValueError, match="attention_mask: RecSA takes a 2D mask"):
        rows_of_batch(2, 5, mask)


@pytest.mark.parametrize("shape", [(2, 4), (2, 6), (1, 5), (3, 5)])
def test_masks_of_another_size_are_refused(shape):
    with pytest.raises(ValueError, match=r"attention_mask: shape .*expected \(2, 5\)"):
        rows_of_batch(2, 5, torch.ones(shape))


def test_masks_that_leave_out_the_cached_part_are_refused():
    history = filled([[1, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match=r"expected \(2, 5\) \(3 cached columns \+ 2 new ones\)"):
        rows_of_batch(2, 2, torch.ones(2, 2), history=history)


def test_masks_that_disagree_with_the_cache_are_refused():
    """Ids that do not extend what the cache was filled with, as far as a mask can show it."""
    history = filled([[0, 1, 1], [1, 1, 1]])
    with pytest.raises(ValueError, match="marks other tokens than the cache holds"):
        rows_of_batch(2, 2, torch.ones(2, 5), history=history)


def test_another_batch_size_is_refused():
    history = filled([[1, 1], [1, 1]])
    with pytest.raises(ValueError, match="batch of 4, but the cache holds 2 rows"):
        rows_of_batch(4, 1, history=history)


def test_positions_that_are_refused():
    for positions, words in (
        (torch.tensor([[0, 1, 3, 4]]), "must rise by one"),
        (torch.tensor([[3, 2, 1, 0]]), "must rise by one"),
        (torch.tensor([[0, 1, 1, 2]]), "must rise by one"),
        (torch.tensor([[0, 1, 2]]), "shape"),
        (torch.tensor([0, 1, 2, 3]), "shape"),
        (torch.zeros(3, 1, 4, dtype=torch.long), "shape"),
        (torch.arange(4).expand(3, 4), "shape"),
    ):
        with pytest.raises(ValueError, match=f"position_ids: .*{words}"):
            rows_of_batch(2 if positions.shape[0] == 3 else 1, 4, position_ids=positions)


def test_documents_in_a_filled_cache_are_refused():
    history = filled([[1, 1]])
    with pytest.raises(ValueError, match="packed documents cannot continue a filled cache"):
        rows_of_batch(1, 4, position_ids=torch.tensor([[2, 3, 0, 1]]), history=history)


def test_document_lengths_beside_padding_are_refused():
    with pytest.raises(ValueError, match="cu_seq_lens_q: cannot be combined"):
        rows_of_batch(1, 4, torch.tensor([[1, 1, 1, 0]]), cu_seq_lens=torch.tensor([0, 2, 3]))


def test_rows_from_columns_directly():
    """A forward in which no row has a token keeps a width of one, so that nothing has an empty dimension."""
    rows = Rows.from_columns(torch.full((2, 3), -1), [4, 5])
    assert rows.width == 1 and rows.counts == (0, 0) and rows.lengths == (4, 5)
    states = torch.randn(2, 1, 3, 2)
    assert rows.gather(states).shape == (2, 1, 1, 2)
    assert not rows.scatter(rows.gather(states)).any()


# ---- masks and positions against what was cached --------------------------------------------------------------------


def history_of(mask: torch.Tensor, **options) -> RowHistory:
    """A history after one forward with this mask."""
    history = RowHistory()
    history.append(rows_of_batch(*mask.shape, mask, **options), mask.shape[1])
    return history


@pytest.mark.parametrize("new", [1, 4])
@pytest.mark.parametrize("same_number", [False, True])
def test_a_mask_that_contradicts_the_cache_is_refused(new, same_number):
    if new == 1 and same_number:
        pytest.skip("a single step compares only the number of tokens, so that it costs nothing")
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, :5] = 0
    other = torch.ones(1, 20 + new, dtype=torch.long)
    other[0, 10:15] = 0
    if not same_number:
        other[0, 15] = 0
    with pytest.raises(ValueError, match="attention_mask: its cached part"):
        rows_of_batch(1, new, other, history=history_of(mask))


@pytest.mark.parametrize("new", [1, 5])
def test_positions_must_go_on_from_the_cached_ones(new):
    history = history_of(torch.ones(1, 20, dtype=torch.long), position_ids=torch.arange(20)[None])
    rows_of_batch(1, new, position_ids=torch.arange(20, 20 + new)[None], history=history)
    with pytest.raises(ValueError, match="position_ids: row 0 goes on at 500 .* expected 20"):
        rows_of_batch(1, new, position_ids=torch.arange(500, 500 + new)[None], history=history)


def test_a_row_may_begin_anywhere_and_must_stay_there():
    history = history_of(torch.ones(1, 20, dtype=torch.long), position_ids=torch.arange(100, 120)[None])
    rows_of_batch(1, 3, position_ids=torch.arange(120, 123)[None], history=history)
    with pytest.raises(ValueError, match="position_ids"):
        rows_of_batch(1, 3, position_ids=torch.arange(20, 23)[None], history=history)


@pytest.mark.parametrize("first", [15, 20])
def test_padded_rows_may_count_tokens_or_columns(first):
    mask = torch.ones(1, 20, dtype=torch.long)
    mask[0, :5] = 0
    rows_of_batch(1, 3, position_ids=torch.arange(first, first + 3)[None], history=history_of(mask))


def test_positions_that_count_a_hole_are_refused():
    mask = torch.ones(1, 30, dtype=torch.long)
    mask[0, 10:17] = 0
    rows_of_batch(1, 30, mask, position_ids=(mask.cumsum(1) - 1).clamp(min=0))
    with pytest.raises(ValueError, match="position_ids"):
        rows_of_batch(1, 30, mask, position_ids=torch.arange(30)[None])


@pytest.mark.parametrize("borders", [[0, 13, 63, 144], [1, 13, 145], [0, 50, 50, 145]])
def test_document_lengths_must_cover_the_tokens(borders):
    with pytest.raises(ValueError, match="cu_seq_lens_q: must rise"):
        rows_of_batch(1, 145, cu_seq_lens=torch.tensor(borders))


def test_document_lengths_that_contradict_the_positions_are_refused():
    positions = torch.cat((torch.arange(13), torch.arange(132)))[None]
    rows_of_batch(1, 145, position_ids=positions, cu_seq_lens=torch.tensor([0, 13, 145]))
    with pytest.raises(ValueError, match="cu_seq_lens_q: marks other documents"):
        rows_of_batch(1, 145, position_ids=positions, cu_seq_lens=torch.tensor([0, 20, 145]))

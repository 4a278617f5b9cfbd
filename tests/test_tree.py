"""Geometry against its definition, the pooler, and levels against the oracle."""

from random import Random

import pytest
import torch

import oracle
from conftest import RELATIVE_RMS, relative_rms, tiny_config
from recsa_qwen3 import RecSAPooler, TreeGeometry, build_levels
from recsa_qwen3.tree_recsa_qwen3 import build_nodes

torch.set_num_threads(1)

# (r, k, s, M)
GEOMETRIES = [(2, 2, 0, 4), (2, 3, 1, 13), (4, 4, 1, 16), (4, 4, 1, 48), (8, 4, 2, 32), (16, 128, 1, 8192)]


def random_pooler(kv_heads: int, r: int, head_dim: int, dtype: torch.dtype = torch.float64) -> RecSAPooler:
    pooler = RecSAPooler(kv_heads, r, head_dim)
    with torch.no_grad():
        for parameter in pooler.parameters():
            parameter.normal_(std=head_dim**-0.5)
    return pooler.to(dtype)


# ---- geometry -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("r", "k", "s", "M"), GEOMETRIES)
def test_depth_is_the_smallest_level_that_fits(r, k, s, M):
    """METHOD 3: the smallest l with ceil((t + 1) / r^l) <= M, at every border, near them and anywhere."""
    geometry = TreeGeometry(r, k, s, M)
    borders = [M * r**level for level in range(5)]
    near = [border + offset for border in borders for offset in range(-2, 3)]
    anywhere = [Random(int(torch.randint(2**31, ()))).randrange(4_000_000) for _ in range(500)]
    for t in (*range(3 * M if M < 100 else 200), *near, *anywhere):
        depth = geometry.depth(t)
        assert depth == oracle.depth(t, r, M)
        assert geometry.is_dense(t) == (depth == 0) == (t + 1 <= M)
    for depth in range(1, 5):
        first = geometry.first_position(depth)
        assert geometry.depth(first) == depth and geometry.depth(first - 1) == depth - 1


def test_no_limit_is_dense_everywhere():
    geometry = TreeGeometry(4, None, 1, 16)
    assert all(geometry.is_dense(t) and geometry.depth(t) == 0 for t in (0, 15, 16, 10**6))


@pytest.mark.parametrize("r", [2, 4, 16])
def test_node_counts(r):
    """A node exists only when all its tokens do: n // r^l nodes at level l, up to the last level that has one."""
    geometry = TreeGeometry(r, 4, 1, 4 * r)
    for tokens in range(3 * r**3 + 2 if r < 16 else 600):
        expected = [tokens]
        level = 1
        while tokens // r**level:
            expected.append(tokens // r**level)
            level += 1
        assert geometry.node_counts(tokens) == expected


def test_geometry_of_a_configuration():
    fields = dict(recsa_branching=8, recsa_top_k=5, recsa_recent=2, recsa_top_capacity=77, recsa_count_bias=True)
    config = tiny_config(**fields)
    assert TreeGeometry.from_config(config) == TreeGeometry(8, 5, 2, 77, True)
    assert TreeGeometry.from_config(tiny_config(recsa_top_capacity=None)).top_capacity == 16
    assert TreeGeometry.from_config(tiny_config()).max_candidates == 16
    config.recsa_top_k = None
    assert TreeGeometry.from_config(config).is_dense(10**6)


# ---- the pooler -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_untrained_pooler_is_the_mean(dtype):
    """METHOD 6: with query 0, slot_bias 0 and proj identity both what is carried and what is read are the mean."""
    children = torch.randn(2, 3, 5, 4, 8).to(dtype)
    pooled, keys = RecSAPooler(3, 4, 8).to(dtype)(children)
    assert pooled.dtype == keys.dtype == dtype
    torch.testing.assert_close(pooled, children.double().mean(-2).to(dtype))
    assert torch.equal(pooled, keys)


def test_pooler_parameters():
    """The state dict: names and shapes that a checkpoint relies on."""
    shapes = {name: tuple(parameter.shape) for name, parameter in RecSAPooler(3, 4, 8).state_dict().items()}
    assert shapes == {"query": (3, 8), "slot_bias": (4,), "proj": (3, 8, 8)}


def test_pooler_gradients():
    """Two levels deep, each parameter is checked against finite differences."""
    pooler = random_pooler(2, 2, 3)
    keys, values = torch.randn(2, 1, 2, 5, 3, dtype=torch.float64).requires_grad_()

    def flat(keys, values, query, slot_bias, proj):
        moved = RecSAPooler(2, 2, 3)
        for name, parameter in (("query", query), ("slot_bias", slot_bias), ("proj", proj)):
            delattr(moved, name)
            setattr(moved, name, parameter)
        levels = build_levels(keys, values, moved, 2, 2)
        return (*levels.keys, *levels.values)

    inputs = [tensor.detach().requires_grad_() for tensor in (keys, values, *pooler.state_dict().values())]
    assert torch.autograd.gradcheck(flat, inputs)


# ---- levels ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("r", [2, 4, 8])
def test_levels_equal_the_oracles(r, dtype):
    """Read keys and mean values of every complete node, for lengths around whole nodes; the rest is finite."""
    pooler = random_pooler(2, r, 32, dtype).requires_grad_(False)
    geometry = TreeGeometry(r, 2, 0, 2 * r)
    for tokens in {1, r - 1, r, r + 1, 2 * r - 1, r * r, 5 * r + 3, r**3 + 1}:
        keys, values = torch.randn(2, 3, 2, tokens, 32).to(dtype)
        depth = len(geometry.node_counts(tokens)) - 1
        levels = build_levels(keys, values, pooler, r, depth)
        assert len(levels.keys) == len(levels.values) == depth + 1
        trees = []
        for row in range(3):
            for head in range(2):
                weights = pooler.query[head], pooler.slot_bias, pooler.proj[head]
                trees.append(oracle.build_tree(keys[row, head], values[row, head], *weights, r))
                assert len(trees[-1]) == depth + 1
        for index, tensors in enumerate(levels[:2]):  # keys, values
            for level, tensor in enumerate(tensors):
                assert tensor.dtype == dtype and torch.isfinite(tensor).all()
                assert level == depth or tensor.shape[2] % r == 0
                built = tensor[:, :, : tokens // r**level].flatten(0, 1)
                expected = torch.stack([tree[level][index] for tree in trees])
                assert relative_rms(built, expected) <= RELATIVE_RMS[dtype]


def test_levels_stop_at_the_depth_asked_for():
    keys, values = torch.randn(2, 1, 2, 70, 8)
    pooler = RecSAPooler(2, 4, 8)
    assert [len(build_levels(keys, values, pooler, 4, depth).keys) for depth in range(4)] == [1, 2, 3, 4]


def test_a_node_depends_on_its_own_tokens_alone():
    """METHOD 2: tokens outside a node, later ones above all, never change it."""
    pooler = random_pooler(2, 4, 8)
    keys, values = torch.randn(2, 1, 2, 64, 8, dtype=torch.float64)
    levels = build_levels(keys, values, pooler, 4, 2)
    keys, values = keys.clone(), values.clone()
    keys[:, :, 32:], values[:, :, 32:] = 7, 7
    changed = build_levels(keys, values, pooler, 4, 2)
    for level in (1, 2):
        number = 32 // 4**level
        assert torch.equal(changed.keys[level][:, :, :number], levels.keys[level][:, :, :number])
        assert torch.equal(changed.values[level][:, :, :number], levels.values[level][:, :, :number])
        assert not torch.equal(changed.keys[level][:, :, number:], levels.keys[level][:, :, number:])


def test_the_projection_stays_out_of_the_recursion():
    """METHOD 6: what is carried upwards is the pooled key, whatever the projection."""
    pooler = random_pooler(2, 4, 8)
    keys, values = torch.randn(2, 1, 2, 64, 8, dtype=torch.float64)
    first = build_nodes(pooler, keys, values, 4)
    with torch.no_grad():
        pooler.proj.mul_(3)
    again = build_nodes(pooler, keys, values, 4)
    assert torch.equal(first.pooled, again.pooled) and torch.equal(first.values, again.values)
    torch.testing.assert_close(again.keys, 3 * first.keys)
    second = build_nodes(pooler, first.pooled, first.values, 4)
    torch.testing.assert_close(build_levels(keys, values, pooler, 4, 2).keys[2], second.keys)


@pytest.mark.parametrize(("r", "k", "s", "m"), [(2, 2, 0, 4), (4, 4, 1, 16), (8, 4, 1, 32), (4, 2, 0, 11)])
def test_candidates_are_those_that_the_oracle_walks(r, k, s, m):
    """METHOD 3: how many entries a query reads at each level; the path has no importance, hence the one more."""
    geometry, tokens, head_dim = TreeGeometry(r, k, s, m), 300, 4
    keys, values = torch.randn(2, tokens, head_dim, dtype=torch.float64).unbind(0)
    zeros, identity = torch.zeros(head_dim, dtype=torch.float64), torch.eye(head_dim, dtype=torch.float64)
    levels = oracle.build_tree(keys, values, zeros, torch.zeros(r, dtype=torch.float64), identity, r)
    cos, sin = oracle.rope_tables(1e4, head_dim, range(tokens))
    for t in (m - 1, m, m + 1, *torch.randint(m, tokens, (6,)).tolist()):
        query = torch.randn(1, head_dim, dtype=torch.float64)
        *_, importance = oracle.attend(query, levels, t, r=r, k=k, s=s, M=m, scaling=0.5, cos=cos, sin=sin)
        walked = [len(importance[level]) + 1 for level in sorted(importance, reverse=True)]
        numbers = geometry.candidates(t)
        assert numbers[:-1] == walked
        parent = (t // r) * r if walked else 0
        assert numbers[-1] == (k - 1) * r * bool(walked) + t - parent + 1

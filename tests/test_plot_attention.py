"""`scripts/plot_attention.py`: what it draws is what the query read."""

import pytest
import torch

import plot_attention
from conftest import ROOT, random_ids, tiny_model
from convert_qwen3 import convert
from plot_attention import CHOSEN, SUMMARISED
from recsa_qwen3 import TreeGeometry


@pytest.mark.parametrize("length", [17, 64, 65, 150, 301])
def test_the_spans_are_the_rows_of_the_attention_matrix(length):
    """Every token is covered once; tokens of one summary share its weight evenly, as the exact matrix says."""
    model, ids = tiny_model().double(), random_ids(1, length)
    geometry = TreeGeometry.from_config(model.config)
    chosen = plot_attention.read(model, ids, layer=1, kv_head=1)
    found = plot_attention.spans(geometry, length - 1, chosen)
    read = [
        (start, size)
        for level, parts in found.items()
        for start, size, what in parts
        if what == SUMMARISED or not level
    ]
    covered = torch.zeros(length, dtype=torch.long)
    for start, size in read:
        covered[start : start + size] += 1
    assert (covered == 1).all() and len(read) < length
    with torch.no_grad():
        weights = model(ids, output_attentions=True).attentions[1][0, :, -1]
    group = len(weights) // model.config.num_key_value_heads
    for start, size in read:
        part = weights[group : 2 * group, start : start + size]
        torch.testing.assert_close(part, part[:, :1].expand_as(part))
    for level, nodes in chosen.items():
        size = geometry.branching**level
        assert [start // size for start, _, what in found[level] if what == CHOSEN] == sorted(nodes)


def test_the_command_writes_a_picture(tmp_path, capsys):
    pytest.importorskip("matplotlib")
    folder, output = tmp_path / "model", tmp_path / "a.png"
    convert(
        str(ROOT / "models" / "small-dense"),
        folder,
        recsa=dict(recsa_branching=8, recsa_top_k=4, recsa_top_capacity=64),
    )
    options = ["--model", str(folder), "--device", "cpu", "--output", str(output)]
    assert plot_attention.main([*options, "--haystack", "700", "--layer", "2", "--kv-head", "3"]) == 0
    assert output.read_bytes().startswith(b"\x89PNG") and "layer 2, KV head 3" in capsys.readouterr().out
    (tmp_path / "text.txt").write_text("the old sailor quietly opened the door. " * 40)
    assert plot_attention.main([*options, "--prompt-file", str(tmp_path / "text.txt")]) == 0
    for wrong, word in (
        (["--layer", "6"], "--layer 6"),
        (["--kv-head", "-5"], "--kv-head -5"),
        (["--haystack", "60"], "dense"),
    ):
        with pytest.raises(SystemExit, match=word):
            plot_attention.main([*options, "--haystack", "700", *wrong])
    with pytest.raises(SystemExit):
        plot_attention.main([*options, "--prompt-file", str(tmp_path / "none")])

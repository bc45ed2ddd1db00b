"""The text of a run: what is held out, and batches that no number of ranks changes."""

from __future__ import annotations

import pytest
import torch

from dtensor_owner.train import data
from dtensor_owner.usage import UsageError


def test_the_held_out_part_and_the_rest_are_the_whole_text():
    text = torch.arange(7919) % 251
    train, held_out = data.split(text.to(torch.uint8), context=16)
    assert len(train) + len(held_out) == len(text)
    assert abs(len(held_out) - len(text) / 10) <= data.STRETCHES
    together = torch.cat([train, held_out]).long()
    assert torch.equal(together.bincount(), text.bincount())


def test_text_of_the_least_length_gives_both_parts_a_sequence(tmp_path):
    file = tmp_path / "text"
    file.write_bytes(b"0123456789")
    corpus = data.load_corpus(file, context=0)
    assert len(corpus.held_out) == 1
    file.write_bytes(b"x" * 50)
    corpus = data.load_corpus(file, context=4)
    assert (len(corpus.train), len(corpus.held_out)) == (45, 5)
    starts = data.even_starts(count=3, length=len(corpus.held_out), context=4)
    assert starts.tolist() == [0, 0, 0]
    with pytest.raises(UsageError, match="holds 50 bytes of text; with --context 5 at least 60"):
        data.load_corpus(file, context=5)


@pytest.mark.parametrize("world_size", [1, 2, 3, 5, 8])
def test_shares_tile_the_batch(world_size):
    for batch in (0, 1, 7, 32):
        shares = [data.share(batch, rank, world_size) for rank in range(world_size)]
        assert [i for share in shares for i in share] == list(range(batch))
        assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_batches_depend_on_seed_and_step_and_stay_inside_the_text():
    def starts(**changes):
        options = {"seed": 3, "step": 5, "batch": 1000, "length": 20, "context": 15, **changes}
        return data.batch_starts(**options)

    assert torch.equal(starts(), starts())
    assert not torch.equal(starts(), starts(step=6))
    assert not torch.equal(starts(), starts(seed=4))
    assert sorted(set(starts().tolist())) == [0, 1, 2, 3, 4]
    inputs, targets = data.sequences(torch.arange(20), starts(), 15)
    assert inputs.shape == targets.shape == (1000, 15)
    assert torch.equal(targets, inputs + 1)
    assert targets.max() == 19


def test_even_starts_reach_from_end_to_end():
    starts = data.even_starts(count=5, length=101, context=20)
    assert starts.tolist() == [0, 20, 40, 60, 80]
    inputs, targets = data.sequences(torch.arange(101), starts, 20)
    assert (inputs.min(), targets.max()) == (0, 100)
    empty, _ = data.sequences(torch.arange(101), starts[:0], 20)
    assert empty.shape == (0, 20)


def test_a_folder_is_read_in_order_without_binaries_and_hidden_files(tmp_path):
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "c.txt").write_bytes(b"second")
    (tmp_path / "a.txt").write_bytes(b"first")
    (tmp_path / "z.bin").write_bytes(b"\0\1")
    (tmp_path / ".git").mkdir()
    for hidden in (tmp_path / ".git" / "a", tmp_path / ".b"):
        hidden.write_bytes(b"hidden")
    corpus = data.load_corpus(tmp_path, context=0)
    assert bytes(torch.cat([corpus.train, corpus.held_out]).tolist()) == b"first\nsecond"
    assert corpus.source == str(tmp_path)


def test_the_default_text_is_the_standard_library():
    corpus = data.load_corpus(None, context=128)
    assert len(corpus.train) > 1_000_000
    assert b"def " in bytes(corpus.held_out[:100_000].tolist())

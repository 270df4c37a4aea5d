import json
import pickle
from contextlib import suppress

import numpy as np
import pytest
import torch

from eagle_fsd.files import write_json
from train.shards import (
    FORMAT_NAME,
    FORMAT_VERSION,
    META_FILE,
    ShardWriter,
    TokenShards,
    read_meta,
    token_dtype,
)

CONVERSATIONS = [
    ([5, 6, 7], [False, True, True]),
    ([1], [True]),
    ([65535, 0, 2, 3, 4], [False, False, False, True, False]),
    ([9, 9], [True, True]),
]


def write_shards(folder, shard_tokens=4, vocab_size=65536, conversations=CONVERSATIONS):
    dtype = token_dtype(vocab_size)
    with ShardWriter(folder / "train", dtype, shard_tokens) as writer:
        for ids, mask in conversations:
            writer.add(ids, mask)
    meta = {
        "format": FORMAT_NAME,
        "version": FORMAT_VERSION,
        "dtype": dtype.name,
        "splits": {"train": writer.summary()},
    }
    write_json(folder / META_FILE, meta)
    return folder


@pytest.mark.parametrize("shard_tokens", [1, 4, 1000])
@pytest.mark.parametrize("vocab_size", [65536, 65537])
def test_what_is_written_is_read_through_all_shards(tmp_path, shard_tokens, vocab_size):
    shards = TokenShards(write_shards(tmp_path, shard_tokens, vocab_size))
    assert len(shards) == 4
    assert shards.num_tokens == 11
    assert shards.num_supervised_tokens == 6
    assert shards.lengths.tolist() == [3, 1, 5, 2]
    assert [(ids.tolist(), mask.tolist()) for ids, mask in shards] == CONVERSATIONS
    ids, mask = shards.conversation(2)
    assert (ids.dtype, mask.dtype) == (torch.int64, torch.bool)
    ids[0] = mask[0] = 1
    assert shards.conversation(2)[0][0] == 65535


def test_files_are_little_endian_with_the_documented_names(tmp_path):
    write_shards(tmp_path)
    folder = tmp_path / "train"
    kinds = (("index", "npy"), ("mask", "bin"), ("tokens", "bin"))
    expected = [f"{kind}-0000{n}.{ending}" for kind, ending in kinds for n in range(3)]
    assert sorted(path.name for path in folder.iterdir()) == expected
    assert (folder / "tokens-00000.bin").read_bytes() == bytes([5, 0, 6, 0, 7, 0, 1, 0])
    assert (folder / "mask-00000.bin").read_bytes() == bytes([0, 1, 1, 1])
    index = np.load(folder / "index-00000.npy")
    assert (index.dtype, index.tolist()) == (np.dtype("<i8"), [0, 3, 4])


def test_shards_are_memory_mapped(tmp_path):
    shards = TokenShards(write_shards(tmp_path))
    for arrays in (shards._tokens, shards._masks, shards._indexes):
        assert all(isinstance(array, np.memmap) for array in arrays)


def test_a_pickled_reader_carries_no_data(tmp_path):
    shards = TokenShards(write_shards(tmp_path, conversations=[([1] * 50_000, [True] * 50_000)]))
    sent = pickle.dumps(shards)
    assert len(sent) < 1000
    assert pickle.loads(sent).conversation(0)[0].tolist() == [1] * 50_000


def test_split_without_conversations_is_empty(tmp_path):
    shards = TokenShards(write_shards(tmp_path, conversations=[]))
    assert (len(shards), shards.num_tokens, shards.lengths.tolist()) == (0, 0, [])
    assert list(shards) == []


@pytest.mark.parametrize("i", [-1, 4])
def test_index_outside_is_refused(tmp_path, i):
    with pytest.raises(IndexError, match=rf"0..3, got {i}"):
        TokenShards(write_shards(tmp_path)).conversation(i)


def test_vocabulary_decides_the_dtype():
    assert token_dtype(65536) == np.dtype("<u2")
    assert token_dtype(65537) == np.dtype("<u4")
    with pytest.raises(ValueError, match="got 0"):
        token_dtype(0)


@pytest.mark.parametrize(
    ("ids", "mask", "message"),
    [([], [], "got 0 and 0"), ([1], [True, True], "got 1 and 2"), ([65536], [True], "do not fit")],
)
def test_writer_refuses_what_it_cannot_store(tmp_path, ids, mask, message):
    writer = ShardWriter(tmp_path, token_dtype(100))
    with pytest.raises(ValueError, match=message):
        writer.add(ids, mask)


def test_an_exception_leaves_finished_shards_and_no_half_one(tmp_path):
    with suppress(KeyError), ShardWriter(tmp_path, token_dtype(100), 4) as writer:
        writer.add([1, 2, 3, 4], [True] * 4)
        writer.add([5], [True])
        raise KeyError
    assert len(list(tmp_path.iterdir())) == 3
    assert not list(tmp_path.glob("*.tmp"))


def test_unfinished_or_foreign_folder_is_refused(tmp_path):
    with pytest.raises(FileNotFoundError, match="not a finished shard folder"):
        TokenShards(tmp_path)
    write_json(tmp_path / META_FILE, {"format": FORMAT_NAME, "version": 99})
    with pytest.raises(ValueError, match="99"):
        read_meta(tmp_path)
    (tmp_path / META_FILE).write_text("{")
    with pytest.raises(ValueError, match="is not JSON"):
        read_meta(tmp_path)


def test_unknown_split_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"unknown split 'test'; choose one of \['train'\]"):
        TokenShards(write_shards(tmp_path), "test")


def test_damaged_shards_are_refused(tmp_path):
    folder = write_shards(tmp_path) / "train"
    whole = (folder / "tokens-00001.bin").read_bytes()
    (folder / "tokens-00001.bin").write_bytes(whole[:-1])
    with pytest.raises(ValueError, match="the index says"):
        TokenShards(tmp_path)
    (folder / "tokens-00001.bin").unlink()
    with pytest.raises(FileNotFoundError, match="tokens-00001"):
        TokenShards(tmp_path)
    (folder / "tokens-00001.bin").write_bytes(whole)
    meta = json.loads((tmp_path / META_FILE).read_text())
    meta["splits"]["train"]["conversations"] = 5
    write_json(tmp_path / META_FILE, meta)
    with pytest.raises(ValueError, match="says 5"):
        TokenShards(tmp_path)

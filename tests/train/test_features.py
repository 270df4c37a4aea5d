import json
from dataclasses import replace

import numpy as np
import pytest
import torch

from eagle_fsd.files import locked, write_json
from eagle_fsd.target import TargetModel
from tests.train.tiny import (
    H,
    V,
    random_conversations,
    save_shards,
    save_target,
    tiny_model,
    tiny_tokenizer,
)
from train import features as features_module
from train.features import (
    CachedFeatures,
    FeatureRequest,
    FeaturesConfig,
    TargetFeatures,
    compute_features,
    main,
    target_identity,
)
from train.shards import META_FILE, TokenShards, read_meta


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    target = save_target(folder / "target")
    shards = save_shards(
        folder / "shards", random_conversations(12), random_conversations(3, seed=9)
    )
    return target, shards


@pytest.fixture(scope="module")
def model(folders):
    return TargetModel(tiny_model())


def config(folders, output, **changes):
    return FeaturesConfig(
        shards=folders[1],
        target=folders[0],
        output=str(output),
        **({"dtype": "float32", "part_tokens": 60, "device": "cpu"} | changes),
    )


def whole(shards):
    return [FeatureRequest(i, ids, 0, ids.numel()) for i, (ids, _) in enumerate(shards)]


def test_a_feature_is_what_lm_head_reads(model):
    ids = torch.randint(0, V, (9,))
    (rows,) = TargetFeatures(model).features([FeatureRequest(0, ids, 0, 9)])
    torch.testing.assert_close(model.logits(rows), model.model(input_ids=ids[None]).logits[0])


@pytest.mark.parametrize("limit", [1, 64, 10_000])
def test_padding_sequences_together_changes_no_feature(model, monkeypatch, limit):
    monkeypatch.setattr(features_module, "CPU_PASS_TOKENS", limit)
    sequences = [torch.randint(0, V, (n,)) for n in (5, 30, 7, 28, 6, 1)]
    requests = [FeatureRequest(i, ids, 0, len(ids)) for i, ids in enumerate(sequences)]
    for request, rows in zip(requests, TargetFeatures(model).features(requests), strict=True):
        alone = model.model.model(input_ids=request.ids[None]).last_hidden_state[0]
        torch.testing.assert_close(rows, alone, rtol=1e-4, atol=1e-5)


def test_cached_features_equal_computed_ones_up_to_bf16(folders, model, tmp_path):
    meta = compute_features(config(folders, tmp_path / "out"))
    assert meta["splits"]["train"]["conversations"] == 12
    assert meta["splits"]["train"]["parts"] > 2
    for split in ("train", "validation"):
        requests = whole(TokenShards(folders[1], split))
        cached = CachedFeatures(tmp_path / "out", split)
        assert len(cached) == len(requests)
        pairs = zip(
            cached.features(requests), TargetFeatures(model).features(requests), strict=True
        )
        for found, expected in pairs:
            assert found.dtype == torch.bfloat16
            torch.testing.assert_close(found, expected.bfloat16())
        part = FeatureRequest(1, requests[1].ids, 2, 5)
        assert torch.equal(cached.features([part])[0], cached.features(requests)[1][2:5])


def test_cached_features_are_memory_mapped(folders, tmp_path):
    compute_features(config(folders, tmp_path / "out"))
    cached = CachedFeatures(tmp_path / "out", "train")
    assert all(isinstance(rows, np.memmap) for rows in cached._rows)


def test_an_interrupted_run_goes_on_behind_its_last_whole_file(folders, tmp_path, monkeypatch):
    compute_features(config(folders, tmp_path / "whole"))
    write_part, calls = features_module._write_part, []

    def killed(folder, number, *others):
        calls.append(number)
        if len(calls) == 3:
            (folder / "features-00002.bin.tmp").write_bytes(b"half")
            raise KeyboardInterrupt
        write_part(folder, number, *others)

    monkeypatch.setattr(features_module, "_write_part", killed)
    with pytest.raises(KeyboardInterrupt):
        compute_features(config(folders, tmp_path / "out"))
    assert not (tmp_path / "out" / META_FILE).exists()
    with pytest.raises(FileNotFoundError, match="not a finished feature folder"):
        CachedFeatures(tmp_path / "out", "train")
    compute_features(config(folders, tmp_path / "out"))
    assert calls[3] == 2
    for path in (tmp_path / "whole").rglob("*"):
        if path.is_file():
            found = tmp_path / "out" / path.relative_to(tmp_path / "whole")
            assert found.read_bytes() == path.read_bytes()
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_run_does_not_go_on_with_other_weights(folders, tmp_path, monkeypatch):
    target = save_target(tmp_path / "target")
    mine = replace(config(folders, tmp_path / "out"), target=target)

    def killed(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(features_module, "_write_part", killed)
        with pytest.raises(KeyboardInterrupt):
            compute_features(mine)
    tiny_model(seed=1).save_pretrained(target)
    with pytest.raises(ValueError, match="begun with other weights of the target"):
        compute_features(mine)
    tiny_model().save_pretrained(target)
    compute_features(mine)


def test_a_finished_folder_of_other_weights_or_with_a_lost_part_is_told(folders, tmp_path):
    target = save_target(tmp_path / "target")
    mine = replace(config(folders, tmp_path / "out"), target=target)
    compute_features(mine)
    tiny_model(seed=1).save_pretrained(target)
    with pytest.raises(ValueError, match="begun with other weights of the target"):
        compute_features(mine)
    tiny_model().save_pretrained(target)
    (tmp_path / "out" / "train" / "index-00000.npy").write_bytes(b"")
    with pytest.raises(ValueError, match="is no index; clear the folder"):
        compute_features(mine)
    (tmp_path / "out" / "train" / "index-00000.npy").unlink()
    with pytest.raises(FileNotFoundError, match="is missing; clear the folder"):
        compute_features(mine)


def test_a_part_that_is_not_whole_is_made_again(folders, tmp_path):
    meta = compute_features(config(folders, tmp_path / "out"))
    index = tmp_path / "out" / "train" / "index-00000.npy"
    whole_index = index.read_bytes()
    index.write_bytes(b"")
    (tmp_path / "out" / META_FILE).unlink()
    (tmp_path / "out" / "unfinished.json").write_text(json.dumps(meta["identity"]))
    assert compute_features(config(folders, tmp_path / "out")) == meta
    assert index.read_bytes() == whole_index


def test_two_runs_do_not_write_into_one_folder(folders, tmp_path):
    (tmp_path / "out").mkdir()
    with locked(tmp_path / "out" / ".lock", "busy"), pytest.raises(RuntimeError, match="another"):
        compute_features(config(folders, tmp_path / "out"))


def test_a_run_killed_before_it_had_a_claim_begins_anew(folders, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "unfinished.json.tmp").write_text("{")
    compute_features(config(folders, tmp_path / "out"))
    assert not list((tmp_path / "out").rglob("*.tmp"))


def test_a_finished_folder_is_left_alone_and_other_settings_are_refused(folders, tmp_path):
    first = compute_features(config(folders, tmp_path / "out"))
    before = (tmp_path / "out" / META_FILE).stat().st_mtime_ns
    assert compute_features(config(folders, tmp_path / "out")) == first
    assert (tmp_path / "out" / META_FILE).stat().st_mtime_ns == before
    with pytest.raises(ValueError, match=r"other settings \(part_tokens\)"):
        compute_features(config(folders, tmp_path / "out", part_tokens=70))


def test_a_limit_ends_each_split_behind_a_whole_conversation(folders, tmp_path):
    meta = compute_features(config(folders, tmp_path / "out", limit_tokens=50))
    lengths = TokenShards(folders[1]).lengths.tolist()
    count = meta["splits"]["train"]["conversations"]
    assert sum(lengths[: count - 1]) < 50 <= sum(lengths[:count])
    assert len(CachedFeatures(tmp_path / "out", "train")) == count


def test_a_folder_of_something_else_is_not_touched(folders, tmp_path):
    (tmp_path / "notes.txt").write_text("mine")
    with pytest.raises(ValueError, match="not empty and holds no features"):
        compute_features(config(folders, tmp_path))
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


@pytest.mark.parametrize("change", ["cut", "missing"])
def test_spoilt_files_are_refused(folders, tmp_path, change):
    compute_features(config(folders, tmp_path / "out"))
    path = tmp_path / "out" / "train" / "features-00000.bin"
    if change == "cut":
        path.write_bytes(path.read_bytes()[:-2])
    else:
        path.unlink()
    with pytest.raises((ValueError, FileNotFoundError), match=r"features-00000\.bin"):
        CachedFeatures(tmp_path / "out", "train")


def test_features_of_other_tokens_are_refused(folders, tmp_path):
    compute_features(config(folders, tmp_path / "out"))
    request = FeatureRequest(0, torch.zeros(3).long(), 0, 3)
    with pytest.raises(ValueError, match="conversation 0 has 3 tokens and"):
        CachedFeatures(tmp_path / "out", "train").features([request])


def test_another_format_is_refused(folders, tmp_path):
    write_json(tmp_path / META_FILE, {"format": "else"})
    with pytest.raises(ValueError, match="make the features again"):
        CachedFeatures(tmp_path, "train")


def test_another_targets_weights_have_another_identity(model):
    assert target_identity(model) == target_identity(TargetModel(tiny_model()))
    assert target_identity(model) == target_identity(TargetModel(tiny_model().bfloat16()))
    assert target_identity(model) != target_identity(TargetModel(tiny_model(seed=1)))


def test_the_command_tells_errors_in_one_line(folders, tmp_path, capsys):
    other = save_shards(
        tmp_path / "other", random_conversations(2), tokenizer=tiny_tokenizer(prefix="x")
    )
    flags = ["--target", folders[0], "--output", str(tmp_path / "out")]
    assert main(["--shards", other, *flags]) == 2
    assert main(["--shards", str(tmp_path / "none"), *flags]) == 2
    errors = capsys.readouterr().err.strip().splitlines()
    errors = [line for line in errors if line.startswith("error:")]
    assert "prepare them with the target's own tokenizer" in errors[0]
    assert "not a finished shard folder" in errors[1]
    assert not (tmp_path / "out").exists()


def test_the_command_writes_what_it_says(folders, tmp_path, capsys):
    flags = ["--shards", folders[1], "--target", folders[0], "--output", str(tmp_path / "out")]
    assert main([*flags, "--device", "cpu", "--num-threads", "1"]) == 0
    assert "train: features of 12 conversations" in capsys.readouterr().out
    meta = json.loads((tmp_path / "out" / META_FILE).read_text())
    assert (meta["dtype"], meta["hidden_size"]) == ("bfloat16", H)
    assert meta["splits"]["train"]["tokens"] == read_meta(folders[1])["splits"]["train"]["tokens"]

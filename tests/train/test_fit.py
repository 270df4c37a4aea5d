import json
import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from eagle_fsd.checkpoint import load_head, save_head
from eagle_fsd.decoder import SpeculativeDecoder
from eagle_fsd.draft_vocab import VOCAB_FILE, read_vocab
from eagle_fsd.drafter import HeadDrafter
from eagle_fsd.target import TargetModel
from tests.train.tiny import (
    H,
    V,
    random_conversations,
    save_shards,
    save_target,
    tiny_head,
    tiny_model,
    tiny_tokenizer,
)
from train import fit as fit_module
from train.batches import COUNTED_EPOCHS, Pieces, Plan, pack
from train.features import FeaturesConfig, compute_features
from train.fit import main
from train.fit_config import FitConfig
from train.losses import training_rows
from train.prepare import tokenizer_identity
from train.run_folder import CHECKPOINT_FILE, CURVE_FILE, METRICS_FILE, RunFolder
from train.shards import TokenShards
from train.vocab import build_vocab
from train.vocab import main as vocab_main

REPOSITORY = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def shards(tmp_path_factory):
    folder = tmp_path_factory.mktemp("shards")
    return save_shards(folder, random_conversations(14), random_conversations(4, seed=9))


def flags(target, shards, output, *more):
    """A run of 6 steps, each of a few conversations."""
    small = (
        "--steps 6 --batch-tokens 80 --log-every 1 --eval-every 3 --save-every 2 --live-prompts 2 "
        "--live-tokens 8 --live-tree 4,2,2 --dtype float32 --device cpu --tracker none"
    )
    return [
        *("--target", target, "--shards", shards, "--output", str(output)),
        *small.split(),
        *more,
    ]


def records(output, kind="train"):
    lines = (Path(output) / METRICS_FILE).read_text().splitlines()
    return [each for each in map(json.loads, lines) if each["kind"] == kind]


def weights(output, name="last"):
    return load_file(Path(output) / name / "model.safetensors")


def assert_same_run(one, other):
    for name, value in weights(one).items():
        assert torch.equal(value, weights(other)[name]), name
    for kind in ("train", "validation"):
        pairs = [[(r["step"], r["loss"]) for r in records(run, kind)] for run in (one, other)]
        assert pairs[0] == pairs[1]


# A run


def test_a_run_writes_heads_metrics_and_a_checkpoint(target, shards, tmp_path, capsys):
    assert main(flags(target, shards, tmp_path / "run", "--unroll", "2")) == 0
    run = tmp_path / "run"
    assert re.search(r"14 conversations, \d+ supervised tokens, 6 steps", capsys.readouterr().out)
    assert [r["step"] for r in records(run)] == [1, 2, 3, 4, 5, 6]
    held_out = records(run, "validation")
    assert [r["step"] for r in held_out] == [3, 6]
    for record in held_out:
        assert all(len(record[name]) == 2 for name in ("loss", "top_1", "top_3", "top_10"))
        assert record["live_acceptance_length"] >= 1.0
    assert (run / CHECKPOINT_FILE).is_file()
    for name in ("best", "last"):
        extras = json.loads((run / name / "config.json").read_text())["eagle_fsd"]
        assert extras["training"]["args"]["seed"] == 0
        assert extras["training"]["tokens_seen"] > 0
        assert extras["training"]["versions"]["torch"] == torch.__version__
        assert load_head(run / name).config.bias is False


def test_a_saved_head_gives_the_same_logits_and_holds_nothing_of_the_target(
    target, shards, tmp_path
):
    main(flags(target, shards, tmp_path / "run"))
    state = torch.load(tmp_path / "run" / CHECKPOINT_FILE, weights_only=True)
    head = tiny_head()
    head.load_state_dict(state["head"])
    model = TargetModel(tiny_model())
    inputs = torch.randn(1, 5, H), torch.randn(1, 5, H), torch.arange(5)[None]
    loaded = load_head(tmp_path / "run" / "last")
    with torch.no_grad():
        assert torch.equal(model.logits(loaded(*inputs)), model.logits(head(*inputs)))
    tensors = weights(tmp_path / "run")
    assert sorted(tensors) == sorted(name for name, _ in head.named_parameters())
    assert not any("embed" in name or "lm_head" in name for name in tensors)
    assert all(V not in value.shape for value in tensors.values())


@pytest.mark.slow
def test_overfitting_a_greedy_answer_gives_nearly_full_acceptance(target, tmp_path):
    depth = 4
    model = TargetModel(tiny_model())
    decoder = SpeculativeDecoder(model)
    prompt = torch.arange(3, 11)[None]
    answer = decoder.plain(prompt, max_new_tokens=60).token_ids
    ids = [*prompt[0].tolist(), *answer]
    shards = save_shards(tmp_path / "one", [(ids, [i >= 8 for i in range(len(ids))])])
    more = ["--steps", "300", "--lr", "5e-3", "--unroll", "3", "--log-every", "50"]
    assert main(flags(target, shards, tmp_path / "run", *more, "--save-every", "300")) == 0
    head = load_head(tmp_path / "run" / "best")  # without held-out text, the last
    decoder = SpeculativeDecoder(model, HeadDrafter(head, model))
    steps = list(decoder.stream(prompt, max_new_tokens=60, tree=f"{depth + 4},{depth},2"))
    assert [token.id for step in steps for token in step.tokens] == answer
    whole_cycles = [len(step.tokens) for step in steps[1:-1]]
    assert np.mean(whole_cycles) >= 0.9 * (depth + 1)


# The order of the data


@pytest.mark.parametrize("max_length", [5, 1000])
def test_every_supervised_row_is_in_one_piece_and_every_piece_in_one_batch(shards, max_length):
    reader = TokenShards(shards)
    pieces = Pieces.of(reader, max_length)
    assert pieces.num_rows.max() <= max_length
    seen = [np.zeros(max(length - 2, 0), dtype=int) for length in reader.lengths.tolist()]
    for i, start, stop in zip(pieces.conversations, pieces.starts, pieces.stops, strict=True):
        seen[i][start:stop] += 1
    for i, counts in enumerate(seen):
        assert counts.max(initial=0) <= 1
        supervised = training_rows(*reader.conversation(i)).is_supervised.numpy()
        assert (counts[supervised] == 1).all()
    plan = Plan(pieces, batch_tokens=60, seed=3)
    num_steps = plan.num_steps(2)
    again = Plan(pieces, batch_tokens=60, seed=3)
    drawn = [plan.batch(step) for step in range(num_steps)]
    assert all(np.array_equal(again.batch(s), drawn[s]) for s in reversed(range(num_steps)))
    counts = np.bincount(np.concatenate(drawn), minlength=len(pieces))
    assert (counts == 2).all()
    assert all(len(b) == 1 or pieces.num_rows[b].sum() <= 60 for b in drawn)
    first = plan.num_steps(1)
    assert not np.array_equal(np.concatenate(drawn[:first]), np.concatenate(drawn[first:]))


def test_any_number_of_epochs_has_its_steps_at_once(shards):
    pieces = Pieces.of(TokenShards(shards), 40)
    plan = Plan(pieces, batch_tokens=60, seed=3)
    counted = plan.num_steps(COUNTED_EPOCHS)
    assert plan.num_steps(1e9) == round(1e9 * counted / COUNTED_EPOCHS)
    assert plan.num_steps(1e308) >= plan.num_steps(1e12)
    assert plan.num_steps(0.5) == round(0.5 * plan.num_steps(1))
    whole = sum(len(pack(order, pieces.num_rows, 60)) for order in _orders(pieces, 3, 3))
    assert plan.num_steps(3) == whole


def _orders(pieces, seed, count):
    return [np.random.default_rng([seed, epoch]).permutation(len(pieces)) for epoch in range(count)]


# Resuming


class StopError(Exception):
    pass


def interrupt(monkeypatch, step):
    train_step = fit_module.Trainer.train_step

    def stopping(self):
        if self.progress.step == step:
            raise StopError
        return train_step(self)

    monkeypatch.setattr(fit_module.Trainer, "train_step", stopping)


@pytest.mark.parametrize("step", [1, 3, 5])
def test_a_resumed_run_equals_an_uninterrupted_one_bit_for_bit(
    target, shards, tmp_path, monkeypatch, step
):
    more = ["--feature-noise", "0.2", "--unroll", "2", "--smooth-l1", "0.1"]
    assert main(flags(target, shards, tmp_path / "whole", *more)) == 0
    with monkeypatch.context() as patch:
        interrupt(patch, step)
        with pytest.raises(StopError):
            main(flags(target, shards, tmp_path / "run", *more))
    with (tmp_path / "run" / METRICS_FILE).open("a") as stream:
        stream.write('{"kind": "tr')  # what a kill may leave
    assert main(flags(target, shards, tmp_path / "run", *more, "--resume")) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


def command(*arguments):
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=REPOSITORY,
        env=environment,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.mark.slow
def test_a_killed_run_resumes_to_the_same_weights(target, shards, tmp_path):
    more = ["--steps", "60", "--eval-every", "1000"]
    process = command("train.fit", *flags(target, shards, tmp_path / "run", *more))
    metrics = tmp_path / "run" / METRICS_FILE
    while not metrics.exists() or len(metrics.read_bytes().splitlines()) < 7:
        assert process.poll() is None, process.communicate()[1]
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert not list((tmp_path / "run").glob("last/*.tmp"))
    assert main(flags(target, shards, tmp_path / "run", *more, "--resume")) == 0
    assert main(flags(target, shards, tmp_path / "whole", *more)) == 0
    assert_same_run(tmp_path / "whole", tmp_path / "run")


@pytest.mark.slow
def test_two_processes_have_the_loss_curve_of_one(target, shards, tmp_path):
    launch = ["torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    process = command(*launch, "-m", "train.fit", *flags(target, shards, tmp_path / "two"))
    errors = process.communicate(timeout=120)[1]
    assert process.returncode == 0, errors
    assert main(flags(target, shards, tmp_path / "one")) == 0
    for kind in ("train", "validation"):
        pairs = zip(records(tmp_path / "one", kind), records(tmp_path / "two", kind), strict=True)
        for one, two in pairs:
            # The bound of the requirement; what differs is the order of float32 sums.
            np.testing.assert_allclose(one["loss"], two["loss"], rtol=0, atol=1e-3)
            assert one["step"] == two["step"]
    training = json.loads((tmp_path / "two" / "last" / "config.json").read_text())["eagle_fsd"]
    assert training["training"]["num_processes"] == 2


# Refusals: one sentence, status 2, nothing overwritten


def refused(arguments, capsys):
    assert main(arguments) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: ")
    return error


def contents(folder):
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def test_an_output_folder_with_a_run_needs_resume(target, shards, tmp_path, capsys):
    main(flags(target, shards, tmp_path / "run"))
    before = contents(tmp_path)
    assert "go on with --resume" in refused(flags(target, shards, tmp_path / "run"), capsys)
    assert contents(tmp_path) == before


@pytest.mark.parametrize("more", [["--lr", "1e-3"], ["--steps", "7"], ["--seed", "1"]])
def test_a_checkpoint_of_another_run_is_refused(target, shards, tmp_path, capsys, more):
    main(flags(target, shards, tmp_path / "run"))
    before = contents(tmp_path)
    error = refused(flags(target, shards, tmp_path / "run", *more, "--resume"), capsys)
    assert "is of another run" in error
    assert contents(tmp_path) == before


def test_a_checkpoint_of_other_shards_is_refused(target, shards, tmp_path, capsys):
    main(flags(target, shards, tmp_path / "run"))
    other = save_shards(tmp_path / "other", random_conversations(13))
    error = refused(flags(target, other, tmp_path / "run", "--resume"), capsys)
    assert "is of another run (" in error
    assert "shards" in error


def test_a_spoilt_checkpoint_is_refused(target, shards, tmp_path, capsys):
    main(flags(target, shards, tmp_path / "run"))
    (tmp_path / "run" / CHECKPOINT_FILE).write_bytes(b"PK\x03\x04 cut off")
    error = refused(flags(target, shards, tmp_path / "run", "--resume"), capsys)
    assert "cannot read" in error


def test_a_folder_of_something_else_is_refused(target, shards, tmp_path, capsys):
    (tmp_path / "notes.txt").write_text("mine")
    assert "is not empty" in refused(flags(target, shards, tmp_path), capsys)
    assert contents(tmp_path) == {tmp_path / "notes.txt": b"mine"}


def test_shards_of_another_tokenizer_are_refused(target, tmp_path, capsys):
    for name, tokenizer in (("a", tiny_tokenizer(prefix="x")), ("b", tiny_tokenizer(V + 1))):
        other = save_shards(tmp_path / name, random_conversations(3), tokenizer=tokenizer)
        error = refused(flags(target, other, tmp_path / "run"), capsys)
        assert "prepare them with the target's own tokenizer" in error
    assert not (tmp_path / "run").exists()


def test_shards_without_a_row_to_learn_are_refused(target, tmp_path, capsys):
    empty = save_shards(tmp_path / "empty", [([1, 2, 3], [True, True, False])])
    error = refused(flags(target, empty, tmp_path / "run"), capsys)
    assert "no supervised row" in error


def test_conversations_beyond_the_targets_context_are_refused(target, tmp_path, capsys):
    long = save_shards(tmp_path / "long", [([1] * 257, [True] * 257)])
    error = refused(flags(target, long, tmp_path / "run"), capsys)
    assert "a conversation of 257 tokens and the target's context is 256" in error


def test_a_head_of_another_target_is_refused(target, shards, tmp_path, capsys):
    save_head(tiny_head(hidden_size=64), tmp_path / "wide")
    more = ["--init", str(tmp_path / "wide")]
    error = refused(flags(target, shards, tmp_path / "run", *more), capsys)
    assert "hidden size is 64 in the head and 32 in the target" in error
    assert not (tmp_path / "run").exists()


def test_a_full_disk_is_one_sentence(target, shards, tmp_path, capsys, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(RunFolder, "save_checkpoint", full)
    error = refused(flags(target, shards, tmp_path / "run"), capsys)
    assert "No space left on device" in error


def test_nan_features_stop_the_run_and_name_the_conversation(target, shards, tmp_path, capsys):
    compute_features(
        FeaturesConfig(shards=shards, target=target, output=str(tmp_path / "f"), device="cpu")
    )
    path = tmp_path / "f" / "train" / "features-00000.bin"
    index = np.load(path.with_name("index-00000.npy"))
    rows = np.memmap(path, dtype="<i2", mode="r+", shape=(int(index[-1]), H))
    rows[index[5] + 3] = 0x7FC0  # NaN in bf16
    rows.flush()
    more = ["--features", str(tmp_path / "f")]
    error = refused(flags(target, shards, tmp_path / "run", *more), capsys)
    assert re.search(r"the loss is not finite at step \d+, in conversations 5 of", error)


def test_nan_in_held_out_features_stops_the_run(target, shards, tmp_path, capsys):
    compute_features(
        FeaturesConfig(shards=shards, target=target, output=str(tmp_path / "f"), device="cpu")
    )
    path = tmp_path / "f" / "validation" / "features-00000.bin"
    rows = np.memmap(path, dtype="<i2", mode="r+")
    rows[:] = 0x7FC0  # NaN in bf16
    rows.flush()
    error = refused(
        flags(target, shards, tmp_path / "run", "--features", str(tmp_path / "f")), capsys
    )
    assert "the loss on held-out conversations" in error
    assert "is not finite at step 3; make their features again" in error
    assert "NaN" not in (tmp_path / "run" / METRICS_FILE).read_text()
    assert not (tmp_path / "run" / "best").exists()


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"\x80\x04."])
def test_a_checkpoint_that_is_none_is_one_sentence(content, target, shards, tmp_path, capsys):
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / CHECKPOINT_FILE).write_bytes(content)
    error = refused(flags(target, shards, tmp_path / "run", "--resume"), capsys)
    assert "cannot read" in error
    assert "remove it to begin the run anew" in error
    assert "weights_only" not in error


def test_a_seed_below_0_is_named(target, shards, tmp_path, capsys):
    error = refused(flags(target, shards, tmp_path / "run", "--seed", "-1"), capsys)
    assert "seed must be >= 0, got -1" in error


def test_what_a_tokenizer_was_last_asked_for_is_not_what_it_is(target, shards, tmp_path):
    tokenizer = tiny_tokenizer()
    before = tokenizer_identity(tokenizer)
    tokenizer("a b c d", truncation=True, max_length=2)
    assert json.loads(tokenizer.backend_tokenizer.to_str())["truncation"] is not None
    assert tokenizer_identity(tokenizer) == before
    tokenizer.chat_template = None  # of a base model, which needs none here
    assert tokenizer_identity(tokenizer) == before | {"chat_template_sha256": None}


def test_tokens_per_second_leave_evaluations_out(target, shards, tmp_path, monkeypatch):
    clock = iter(range(10**6))
    monkeypatch.setattr(fit_module.time, "perf_counter", lambda: float(next(clock)))
    evaluate = fit_module.Trainer._evaluate

    def long_evaluation(trainer):
        for _ in range(1000):
            next(clock)
        evaluate(trainer)

    monkeypatch.setattr(fit_module.Trainer, "_evaluate", long_evaluation)
    more = ("--log-every", "2", "--eval-every", "3")
    assert main([*flags(target, shards, tmp_path / "run"), *more]) == 0
    rates = [
        record["tokens_per_s"]
        for record in RunFolder(tmp_path / "run").records()
        if record["kind"] == "train"
    ]
    assert len(rates) == 3
    assert max(rates) < 3 * min(rates)


def test_features_of_other_shards_or_another_target_are_refused(target, shards, tmp_path, capsys):
    other = save_shards(tmp_path / "other", random_conversations(3))
    compute_features(
        FeaturesConfig(shards=other, target=target, output=str(tmp_path / "f"), device="cpu")
    )
    more = ["--features", str(tmp_path / "f")]
    error = refused(flags(target, shards, tmp_path / "run", *more), capsys)
    assert "are of another token shards" in error
    second = save_target(tmp_path / "second", seed=5)
    error = refused(flags(second, other, tmp_path / "run", *more), capsys)
    assert "are of another target" in error


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_tokens": 0}, "batch_tokens must be >= 1, got 0"),
        ({"lr": 0.0}, "lr must be > 0, got 0.0"),
        ({"warmup": 1.0}, r"warmup must be a share in \[0, 1\)"),
        ({"dtype": "float64"}, "dtype must be one of"),
        ({"live_tree": "many"}, "tree must be auto or N,DEPTH,K"),
        ({"unroll": 0}, "unroll must be >= 1"),
        ({"output": None}, "name a folder with --output"),
        ({"limit_minutes": -1.0}, "limit_minutes must be > 0"),
    ],
)
def test_wrong_settings_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        FitConfig(**({"shards": "s", "target": "t", "output": "o"} | changes))


# Options


def test_cached_features_train_like_computed_ones(target, shards, tmp_path):
    compute_features(
        FeaturesConfig(shards=shards, target=target, output=str(tmp_path / "f"), device="cpu")
    )
    main(flags(target, shards, tmp_path / "one"))
    main(flags(target, shards, tmp_path / "two", "--features", str(tmp_path / "f")))
    for one, two in zip(records(tmp_path / "one"), records(tmp_path / "two"), strict=True):
        np.testing.assert_allclose(one["loss"], two["loss"], atol=0.02)  # bf16 features


def test_a_biased_head_loses_its_bias_with_a_log_line_or_keeps_it(target, shards, tmp_path, caplog):
    save_head(tiny_head(bias=True), tmp_path / "biased")
    more = ["--init", str(tmp_path / "biased"), "--lr", "1e-9"]
    main(flags(target, shards, tmp_path / "run", *more))
    assert "the bias of fc is dropped" in caplog.text
    assert "fc.bias" not in weights(tmp_path / "run")
    close = {"rtol": 0, "atol": 1e-6}  # six steps of 1e-9
    torch.testing.assert_close(
        weights(tmp_path / "run")["fc.weight"], tiny_head(bias=True).fc.weight.detach(), **close
    )
    main(flags(target, shards, tmp_path / "kept", *more, "--bias"))
    assert "fc.bias" in weights(tmp_path / "kept")


def test_a_draft_vocabulary_goes_with_the_head(target, shards, tmp_path):
    main(flags(target, shards, tmp_path / "run", "--draft-vocab", "40"))
    vocab = read_vocab(tmp_path / "run" / "last" / VOCAB_FILE)
    assert vocab["size"] == len(vocab["token_ids"]) == 40
    config = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert config["eagle_fsd"]["draft_vocab_size"] == 40
    assert config["vocab_size"] == V


def test_a_draft_vocabulary_of_ids_alone_is_enough(target, shards, tmp_path):
    file = tmp_path / "ids.json"
    file.write_text(json.dumps({"token_ids": [*range(1, 10)]}))
    assert main(flags(target, shards, tmp_path / "run", "--draft-vocab", str(file))) == 0
    config = json.loads((tmp_path / "run" / "last" / "config.json").read_text())
    assert config["eagle_fsd"]["draft_vocab_size"] == 9
    assert config["eagle_fsd"]["draft_vocab_coverage"] is None


def test_a_limit_in_minutes_ends_the_run_and_its_schedule(target, shards, tmp_path):
    more = ["--steps", "100000", "--limit-minutes", "0.01", "--log-every", "1"]
    assert main(flags(target, shards, tmp_path / "run", *more)) == 0
    last = records(tmp_path / "run")[-1]
    assert 0.6 <= last["elapsed_s"] < 20
    assert last["lr"] < 2e-4
    assert weights(tmp_path / "run")


def test_a_benchmark_prints_figures_and_writes_nothing(target, shards, tmp_path, capsys):
    arguments = ["--shards", shards, "--target", target, "--benchmark", "2", "--device", "cpu"]
    assert main(arguments) == 0
    figures = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert figures["tokens_per_s"] > 0
    assert figures["peak_memory_bytes"] > 0
    assert not list(tmp_path.iterdir())


def test_the_curve_is_drawn_and_the_tracker_fed_where_they_are_installed(target, shards, tmp_path):
    pytest.importorskip("matplotlib")
    pytest.importorskip("tensorboard")
    main(flags(target, shards, tmp_path / "run", "--tracker", "tensorboard"))
    assert (tmp_path / "run" / CURVE_FILE).read_bytes().startswith(b"\x89PNG")
    assert list((tmp_path / "run" / "tracker").glob("events*"))


# The draft vocabulary


def test_the_most_frequent_answer_tokens_are_kept_the_smaller_id_first(tmp_path, capsys):
    ids = [9, 9, 9, 5, 5, 7, 7, 3]
    mask = [False, True, True, True, True, True, True, True]
    shards = save_shards(tmp_path / "s", [(ids, mask)])
    vocab = build_vocab(TokenShards(shards), 2)
    assert vocab["token_ids"] == [5, 7]
    assert vocab["coverage"] == pytest.approx(4 / 7, abs=1e-6)
    output = tmp_path / VOCAB_FILE
    assert vocab_main(["--shards", shards, "--size", "2", "--output", str(output)]) == 0
    assert "2 tokens cover 57.14%" in capsys.readouterr().out
    assert read_vocab(output) == vocab
    assert vocab_main(["--shards", shards, "--size", "0", "--output", str(output)]) == 2
    assert "must have 1..128 tokens, got 0" in capsys.readouterr().err


@pytest.mark.parametrize("content", ["{", "[]", '{"token_ids": []}', '{"token_ids": [2, 2]}'])
def test_a_spoilt_draft_vocabulary_is_refused(tmp_path, content):
    (tmp_path / VOCAB_FILE).write_text(content)
    with pytest.raises(ValueError, match="draft_vocab"):
        read_vocab(tmp_path / VOCAB_FILE)

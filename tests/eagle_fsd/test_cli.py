"""The commands, as a user meets them: what they print, and one line with status 2 for bad input."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from eagle_fsd.__main__ import build_parser, main
from eagle_fsd.checkpoint import WEIGHTS, save_head
from eagle_fsd.command import load_decoder
from eagle_fsd.config import TreeConfig
from eagle_fsd.draft_head import DraftHead
from eagle_fsd.tuning import TreeChoice, setting_of, store_choice
from tests.scripted import byte_tokenizer
from tests.stubs import tiny_head, tiny_model

COMMANDS = ("generate", "compare", "inspect", "fetch")
FLAGS = (
    *("target", "draft-head", "tree", "dtype", "device", "seed", "json", "max-new-tokens"),
    *("rule", "threshold", "divergence", "budget", "temperature", "top-p", "top-k", "min-p"),
)
ROOT = Path(__file__).parents[2]


def spoiled(head: DraftHead, folder: Path) -> Path:
    """A head folder whose weights are cut off."""
    save_head(head, folder)
    data = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(data[: len(data) // 2])
    return folder


@pytest.fixture(scope="module")
def models(tmp_path_factory):
    """Folders: a target, one with less context, one of no family, and heads of all kinds."""
    root = tmp_path_factory.mktemp("models")
    model = tiny_model(vocab_size=272)
    model.save_pretrained(root / "target")
    tiny_model(vocab_size=272, max_position_embeddings=30).save_pretrained(root / "short")
    for name in ("target", "short"):
        byte_tokenizer().save_pretrained(root / name)
    save_head(tiny_head(model), root / "head", extras={"steps": 7})
    save_head(tiny_head(tiny_model(vocab_size=272, hidden_size=64)), root / "wide")
    save_head(tiny_head(tiny_model(vocab_size=300)), root / "other-words")
    spoiled(tiny_head(model), root / "cut")
    save_head(tiny_head(model), root / "eagle3")
    torch.save({"midlayer.fc.weight": torch.zeros(1)}, root / "eagle3" / "pytorch_model.bin")
    (root / "eagle3" / WEIGHTS).unlink()
    return root


@pytest.fixture(autouse=True)
def offline(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)


def arguments(models: Path, command: str = "generate", **changes: Any) -> list[str]:
    """Flags of a request that works, and changes to it; None leaves a flag out."""
    flags = {
        "target": models / "target",
        "draft_head": models / "head",
        "prompt": "hi",
        "max_new_tokens": 12,
        "dtype": "float32",
        "tree": "8,3,3",
    } | changes
    given = [
        (f"--{name.replace('_', '-')}", str(value))
        for name, value in flags.items()
        if value is not None
    ]
    return [command, *(part for pair in given for part in pair)]


def run(argv: list[str]) -> int:
    """The status of a command, argparse's own exits included."""
    try:
        return main(argv)
    except SystemExit as stop:
        return int(stop.code or 0)


def refused(capsys: pytest.CaptureFixture[str], argv: list[str]) -> str:
    """Runs a command that must end with status 2 and one line; returns that line."""
    assert run(argv) == 2
    captured = capsys.readouterr()
    # Progress bars stand on their own lines and are no message.
    lines = [line.split("\r")[-1] for line in captured.err.split("\n")]
    lines = [line for line in lines if line and "it/s]" not in line]
    assert len(lines) == 1, captured.err
    assert lines[0].startswith("error: ")
    assert not captured.out
    return lines[0]


# generate


def test_generate_prints_text_and_then_its_figures(models, capsys):
    assert main(arguments(models)) == 0
    out = capsys.readouterr().out
    text, figures = out.rstrip("\n").rsplit("\n\n", 1)
    assert figures.startswith("[12 tokens, ")
    assert figures.endswith("rule exact, tree 8,3,3, stopped by length]")
    assert "acceptance length" in figures
    assert main([*arguments(models), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["text"] == text


def test_json_is_one_object_with_ids_and_statistics(models, capsys):
    argv = arguments(models, temperature=1.0, seed=3, rule="fuzzy", threshold=0.3)
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert len(result["token_ids"]) == result["stats"]["num_tokens"] == 12
    assert result["finish_reason"] == "length"
    assert result["stats"]["seed"] == 3
    assert result["stats"]["rule"] == "fuzzy:0.3:js"
    assert result["stats"]["tree"] == "8,3,3"
    assert result["stats"]["kl_spent"] >= 0.0


def test_json_stays_json_when_a_rule_spends_without_bound(models, capsys):
    # Accept-first rules take children that top-k forbids: infinitely many nats.
    argv = arguments(models, temperature=1.0, top_k=1, rule="fuzzy_2025:inf:ag_mean")
    assert main([*argv, "--json"]) == 0
    result = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert result["stats"]["kl_spent"] == "inf"


def ids(argv: list[str], capsys: pytest.CaptureFixture[str]) -> list[int]:
    assert main([*argv, "--json"]) == 0
    found: list[int] = json.loads(capsys.readouterr().out)["token_ids"]
    return found


def test_exact_and_plain_give_the_same_ids(models, capsys):
    for temperature in (0.0, 1.0):
        argv = arguments(models, temperature=temperature)
        assert ids(argv, capsys) == ids([*argv, "--plain"], capsys)


def test_plain_needs_no_draft_head(models, capsys):
    assert main([*arguments(models, draft_head=None), "--plain"]) == 0
    assert "tree plain" in capsys.readouterr().out


def test_a_small_model_can_draft_instead_of_a_head(models, capsys):
    argv = arguments(models, draft_head=None, draft_model=models / "target")
    assert ids(argv, capsys) == ids(arguments(models), capsys)


def test_every_flag_reaches_the_request(models, capsys):
    base = {"temperature": 1.5, "max_new_tokens": 20}
    plain = ids(arguments(models, **base), capsys)
    for change in ({"seed": 1}, {"top_k": 2}, {"top_p": 0.2}, {"min_p": 0.9}, {"system": "s"}):
        assert ids(arguments(models, **base, **change), capsys) != plain
    assert len(ids(arguments(models, **(base | {"max_new_tokens": 3})), capsys)) == 3
    assert main([*arguments(models), "--stop", "\x00never", "--stop", "never", "--json"]) == 0
    capsys.readouterr()


def test_a_stop_string_cuts_the_text(models, capsys):
    assert main([*arguments(models, max_new_tokens=40), "--json"]) == 0
    text = json.loads(capsys.readouterr().out)["text"]
    stop = text[len(text) // 2]
    assert main([*arguments(models, max_new_tokens=40), "--stop", stop, "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert (result["text"], result["finish_reason"]) == (text.split(stop)[0], "stop")


def test_a_prompt_can_come_from_standard_input(models, capsys, monkeypatch):
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi"))
    assert ids(arguments(models, prompt="-"), capsys) == ids(arguments(models), capsys)


def test_eager_attention_can_be_chosen(models, capsys):
    argv = arguments(models)
    eager = arguments(models, attn_implementation="eager")
    assert ids(argv, capsys) == ids(eager, capsys)


# compare


def test_compare_shows_both_and_their_ratio(models, capsys):
    assert main(arguments(models, "compare")) == 0
    out = capsys.readouterr().out
    assert "--- plain decoding" in out
    assert "--- EAGLE-2, exact" in out
    assert "the two texts are identical; EAGLE-2 / plain tokens per second: " in out
    assert main([*arguments(models, "compare"), "--json"]) == 0
    both = json.loads(capsys.readouterr().out, parse_constant=pytest.fail)
    assert both["plain"]["token_ids"] == both["tree"]["token_ids"]
    assert both["ratio"] > 0.0


def test_compare_says_when_a_relaxed_rule_changed_the_text(models, capsys):
    argv = arguments(models, "compare", rule="fuzzy", threshold="inf", max_new_tokens=30)
    assert main(argv) == 0
    assert "the two texts are different" in capsys.readouterr().out


def test_compare_drafts_where_exact_decoding_is_faster_without(
    models, capsys, tmp_path, monkeypatch
):
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path))
    argv = arguments(models, "compare", tree=None)
    decoder = load_decoder(build_parser().parse_args(argv))
    store_choice(setting_of(decoder.target, decoder.drafter), TreeChoice(TreeConfig(9, 3, 3), 0.5))
    assert main([*argv, "--json"]) == 0
    both = json.loads(capsys.readouterr().out)
    assert both["plain"]["stats"]["tree"] == "plain"
    assert both["tree"]["stats"]["tree"] == "9,3,3"
    assert main([*arguments(models, tree=None), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["stats"]["tree"] == "plain"
    assert main(argv) == 0
    assert "tree 9,3,3" in capsys.readouterr().out


# inspect


def test_inspect_says_what_a_head_is_and_whether_it_fits(models, capsys):
    argv = ["inspect", str(models / "head"), "--target", str(models / "target")]
    assert main(argv) == 0
    facts = dict(line.split(None, 1) for line in capsys.readouterr().out.splitlines())
    assert (facts["hidden_size"], facts["vocab_size"], facts["format"]) == ("32", "272", "EAGLE")
    assert facts["fits"] == str(models / "target")
    assert main([*argv, "--json"]) == 0
    values = json.loads(capsys.readouterr().out)
    assert values["eagle_fsd"] == {"steps": 7}
    assert values["dtype"] == "float32"
    assert main(["inspect", str(models / "head")]) == 0
    assert "fits" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("head", "words"),
    [
        ("wide", "hidden size is 64 in the head and 32 in the target"),
        ("other-words", "vocabulary is 300 in the head and 272 in the target"),
        ("cut", "draft head weights are corrupted or cut off"),
        ("eagle3", "is an EAGLE-3 head; only EAGLE and EAGLE-2 heads"),
        ("target", "does not match its config"),
        ("none/at/all", "no draft head at"),
    ],
)
def test_inspect_refuses_with_the_reason(models, capsys, head, words):
    argv = ["inspect", str(models / head), "--target", str(models / "target")]
    assert words in refused(capsys, argv)


def test_inspect_refuses_a_target_of_a_family_that_is_not_supported(models, tmp_path, capsys):
    (tmp_path / "config.json").write_text('{"model_type": "vit"}')
    argv = ["inspect", str(models / "head"), "--target", str(tmp_path)]
    assert "is of family 'vit'; supported families are gemma2" in refused(capsys, argv)


# bad input


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"target": "/nothing/here"}, "no target at '/nothing/here'"),
        ({"target": "nobody/nothing"}, "cannot load target 'nobody/nothing'"),
        ({"target": "model.gguf"}, "no GGUF file at model.gguf"),
        ({"draft_head": "./nothing"}, "no draft head at './nothing'"),
        ({"draft_head": "nobody/nothing"}, "no hub repository for draft head 'nobody/nothing'"),
        ({"draft_head": "HEADS/wide"}, "hidden size is 64 in the head and 32 in the target"),
        ({"draft_head": "HEADS/cut"}, "corrupted or cut off"),
        ({"draft_head": "HEADS/eagle3"}, "is an EAGLE-3 head"),
        ({"draft_head": None}, "give --draft-head or --draft-model, or use generate --plain"),
        ({"draft_model": "HEADS/target"}, "exclude each other; give one of them"),
        ({"target": "HEADS/short", "prompt": "x" * 50}, "the target's context is 30"),
        ({"prompt": ""}, "the prompt is empty"),
        ({"tree": "9,2,2"}, "fewer than num_draft_tokens 9"),
        ({"tree": "0,1,1"}, "num_draft_tokens must be >= 1, got 0"),
        ({"tree": "4,0,4"}, "depth must be >= 1, got 0"),
        ({"tree": "4,4,0"}, "top_k must be >= 1, got 0"),
        ({"tree": "big"}, "tree must be auto or N,DEPTH,K"),
        ({"temperature": -1}, "temperature must be finite and >= 0, got -1.0"),
        ({"temperature": "nan"}, "temperature must be finite"),
        ({"temperature": "hot"}, "argument --temperature: invalid float value: 'hot'"),
        ({"top_p": 0}, "top_p must be in (0, 1], got 0.0"),
        ({"top_p": 1.5}, "top_p must be in (0, 1], got 1.5"),
        ({"top_k": -1}, "top_k must be >= 0, got -1"),
        ({"min_p": 2}, "min_p must be in [0, 1], got 2.0"),
        ({"max_new_tokens": 0}, "max_new_tokens must be >= 1, got 0"),
        ({"max_new_tokens": "many"}, "argument --max-new-tokens: invalid int value"),
        ({"device": "cuda"}, "device 'cuda' requested but torch sees 0 CUDA devices"),
        ({"device": "gpu"}, "unknown device 'gpu'"),
        ({"dtype": "float31"}, "unknown dtype 'float31'"),
        ({"rule": "fuzy"}, "unknown acceptance rule 'fuzy'"),
        ({"rule": "fuzzy:-1:js"}, "threshold"),
        ({"threshold": 0.3}, "rule 'exact' has no knob 'threshold'"),
        ({"attn_implementation": "flash"}, "argument --attn-implementation: invalid choice"),
        ({"stop": ""}, "a stop string must not be empty"),
        ({"prompt": None}, "the following arguments are required: --prompt"),
        ({"target": None}, "the following arguments are required: --target"),
        ({"repetition_penalty": 1.5}, "unrecognized arguments: --repetition-penalty 1.5"),
    ],
    ids=lambda value: None if isinstance(value, str) else "-".join(value),
)
@pytest.mark.parametrize("command", ["generate", "compare"])
def test_bad_input_is_one_line_and_status_2(models, capsys, changes, words, command):
    changes = {
        name: value.replace("HEADS", str(models)) if isinstance(value, str) else value
        for name, value in changes.items()
    }
    assert words in refused(capsys, arguments(models, command, **changes))


def test_a_rule_beside_plain_is_one_line(models, capsys):
    argv = [*arguments(models, rule="fuzzy:0.3:js"), "--plain"]
    assert "plain decoding has no tree to relax" in refused(capsys, argv)


@pytest.mark.parametrize("argv", [[], ["chat-with-me"], ["--target", "demo"], ["inspect"]])
def test_wrong_commands_are_one_line(capsys, argv):
    assert "--help" in refused(capsys, argv)


def test_logits_that_overflow_are_one_line(models, tmp_path, capsys):
    model = tiny_model(vocab_size=272)
    model.model.norm.weight.data.fill_(torch.nan)
    model.save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    assert "NaN" in refused(capsys, arguments(models, target=tmp_path))


def test_an_interrupt_ends_with_its_own_status(models, monkeypatch, capsys):
    def interrupt(*_args: object, **_options: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("eagle_fsd.__main__.load_decoder", interrupt)
    assert main(arguments(models)) == 130


# help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_explains_itself(capsys, command):
    assert run([command, "--help"]) == 0
    out = capsys.readouterr().out
    assert out.startswith(f"usage: python -m eagle_fsd {command}")
    if command == "generate":
        assert all(f"--{flag}" in out for flag in FLAGS)


def test_the_module_runs_and_lists_its_commands():
    finished = subprocess.run(
        [sys.executable, "-m", "eagle_fsd", "--help"],
        cwd=ROOT,
        env=os.environ | {"HF_HUB_OFFLINE": "1"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert all(command in finished.stdout for command in COMMANDS)
    assert not finished.stderr

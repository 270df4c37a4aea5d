"""Our model of lm-eval, by lm-eval itself on local tasks: its scores are those of `hf`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast

from eagle_fsd.checkpoint import save_head
from evaluation import lm_eval as command
from tests.train.tiny import tiny_head, tiny_model

lm_eval = pytest.importorskip("lm_eval")

from lm_eval.api.instance import Instance  # noqa: E402 - only where it is installed
from lm_eval.models.huggingface import HFLM  # noqa: E402
from lm_eval.tasks import TaskManager  # noqa: E402

from evaluation.lm_eval_model import EagleFsdLM, generation_options  # noqa: E402

REPOSITORY = Path(__file__).parents[2]
CONTEXT = 256
MARKS = ("<s>", "</s>", "<user>", "<assistant>")
CHAT_TEMPLATE = (
    "{% for m in messages %}{% if m['role'] == 'system' %}"
    "{{ raise_exception('no system message') }}{% endif %}"
    "<{{ m['role'] }}> {{ m['content'] }} {% endfor %}"
    "{% if add_generation_prompt %}<assistant> {% endif %}"
)
TASKS = {
    "words": {
        "output_type": "generate_until",
        "doc_to_text": "{{question}}",
        "doc_to_target": "{{answer}}",
        "generation_kwargs": {"until": ["w7", "w11 w"], "max_gen_toks": 12, "do_sample": False},
        "metric_list": [{"metric": "exact_match", "higher_is_better": True}],
    },
    "choices": {
        "output_type": "multiple_choice",
        "doc_to_text": "{{question}}",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{label}}",
        "metric_list": [{"metric": "acc", "higher_is_better": True}],
    },
    "texts": {
        "output_type": "loglikelihood_rolling",
        "doc_to_text": "",
        "doc_to_target": "{{long}}",
        "metric_list": [{"metric": "word_perplexity", "higher_is_better": False}],
    },
}


def words_of(seed: int, number: int) -> str:
    ids = torch.randint(0, 124, (number,), generator=torch.Generator().manual_seed(seed))
    return " ".join(f"w{i}" for i in ids.tolist())


def tokenizer() -> PreTrainedTokenizerFast:
    """Words w0 to w123, a few marks, and a beginning of text that every text gets."""
    words = [*MARKS, *(f"w{number}" for number in range(128 - len(MARKS)))]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, "w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    backend.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    made = PreTrainedTokenizerFast(
        tokenizer_object=backend, bos_token="<s>", eos_token="</s>", unk_token="w0"
    )
    made.chat_template = CHAT_TEMPLATE
    return made


@pytest.fixture(scope="module")
def models_(tmp_path_factory: pytest.TempPathFactory) -> tuple[str, str]:
    """Folders of a tiny target and its head."""
    folder = tmp_path_factory.mktemp("models")
    tiny_model().save_pretrained(folder / "target")
    tokenizer().save_pretrained(folder / "target")
    save_head(tiny_head(), folder / "head")
    return str(folder / "target"), str(folder / "head")


def ours(models_: tuple[str, str], **changes: Any) -> EagleFsdLM:
    target, head = models_
    given = {"draft_head": head, "dtype": "float32", "device": "cpu", "tree": "6:3:2"}
    return EagleFsdLM(target, **(given | changes))


@pytest.fixture(scope="module")
def exact(models_: tuple[str, str]) -> EagleFsdLM:
    return ours(models_)


@pytest.fixture(scope="module")
def reference(models_: tuple[str, str]) -> HFLM:
    return HFLM(models_[0], revision=None, dtype="float32", device="cpu", batch_size=1)


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory, reference: HFLM) -> Path:
    """A folder of task files; half of the questions have the answer that plain decoding gives."""
    folder = tmp_path_factory.mktemp("tasks")
    settings = TASKS["words"]["generation_kwargs"]
    records = []
    for number in range(8):
        question = words_of(number, 4 + number)
        (answer,) = reference.generate_until([request("generate_until", question, settings)], True)
        records.append(
            {
                "question": question,
                "answer": answer if number % 2 else "w1",
                "choices": [words_of(100 * number + i, 1 + i % 3) for i in range(4)],
                "label": number % 4,
                "long": words_of(number, 300 * (number % 2) + 20),
            }
        )
    data = folder / "data.json"
    data.write_text("".join(json.dumps(record) + "\n" for record in records))
    for name, task in TASKS.items():
        config = {
            "task": name,
            "dataset_path": "json",
            "dataset_kwargs": {
                "data_files": {"test": str(data)},
                "cache_dir": str(folder / "cache"),
            },
            "test_split": "test",
            **task,
        }
        (folder / f"{name}.yaml").write_text(json.dumps(config))  # JSON is YAML
    return folder


def request(kind: str, *arguments: Any) -> Instance:
    return Instance(kind, {}, arguments, 0)


def evaluate(model: Any, tasks: Path, **options: Any) -> Any:
    manager = TaskManager(include_path=str(tasks), include_defaults=False)
    return lm_eval.simple_evaluate(
        model, tasks=[*TASKS], task_manager=manager, log_samples=True, bootstrap_iters=0, **options
    )


def figures(results: Any) -> dict[str, dict[str, float]]:
    return {
        name: {key: v for key, v in found.items() if "," in key and not isinstance(v, str)}
        for name, found in results["results"].items()
    }


def responses(results: Any) -> dict[str, list[Any]]:
    return {
        name: [sample["resps"] for sample in sorted(samples, key=lambda each: each["doc_id"])]
        for name, samples in results["samples"].items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("options", [{}, {"apply_chat_template": True}, {"num_fewshot": 2}])
def test_exact_scores_are_those_of_the_plain_target(
    models_: tuple[str, str],
    exact: EagleFsdLM,
    reference: HFLM,
    tasks: Path,
    options: dict[str, Any],
) -> None:
    found = evaluate(exact, tasks, **options)
    plain = evaluate(ours(models_, plain=True), tasks, **options)
    theirs = evaluate(reference, tasks, **options)
    assert found["results"]["words"].keys() >= {"exact_match,none"}
    if not options:
        assert found["results"]["words"]["exact_match,none"] == 0.5
    assert responses(found)["words"] == responses(plain)["words"] == responses(theirs)["words"]
    for name, scores in figures(found).items():
        assert scores == figures(plain)[name]
        # fp32, the same sums in another order.
        assert scores == pytest.approx(figures(theirs)[name], rel=1e-5)
    assert found["config"]["eagle_fsd_rule"] == "exact"


def test_log_likelihoods_are_the_targets(exact: EagleFsdLM, reference: HFLM) -> None:
    context, other = words_of(1, 9), words_of(2, 3)
    pairs = [
        *((context, f" {words_of(seed, 1 + seed % 4)}") for seed in range(6)),
        (other, " w5 w6"),
        (context, " w9"),
        ("", "w3 w4"),
        (words_of(4, 300), " w1 w2"),  # its end is read
        ("w1 ", "w2"),
    ]
    # A continuation that greedy decoding gives.
    (greedy,) = reference.generate_until(
        [request("generate_until", context, {"until": [], "max_gen_toks": 3})], True
    )
    pairs.append((context, f" {greedy}"))
    requests = [request("loglikelihood", *pair) for pair in pairs]
    found = exact.loglikelihood(requests, disable_tqdm=True)
    theirs = reference.loglikelihood(requests, disable_tqdm=True)
    # fp32, the same sums in another order.
    assert [score for score, _ in found] == pytest.approx([s for s, _ in theirs], abs=1e-3)
    assert [is_greedy for _, is_greedy in found] == [is_greedy for _, is_greedy in theirs]
    assert found[-1][1]
    assert not found[0][1]


def test_rolling_log_likelihoods_cover_long_texts(exact: EagleFsdLM, reference: HFLM) -> None:
    requests = [
        request("loglikelihood_rolling", words_of(seed, number))
        for seed, number in enumerate((1, 20, CONTEXT - 1, CONTEXT, 700))
    ]
    found = exact.loglikelihood_rolling(requests, disable_tqdm=True)
    theirs = reference.loglikelihood_rolling(requests, disable_tqdm=True)
    assert found == pytest.approx(theirs, rel=1e-5)


@pytest.mark.parametrize(
    "settings",
    [
        {"until": ["w7"], "max_gen_toks": 30},
        {"until": "w3", "max_new_tokens": 20, "do_sample": False, "temperature": 0.7},
        {"until": ["</s>"], "max_tokens": 9, "num_beams": 1},
        {"until": None, "temperature": 0.0},
    ],
)
def test_answers_stop_where_lm_evals_own_model_stops(
    exact: EagleFsdLM, reference: HFLM, settings: dict[str, Any]
) -> None:
    texts = [words_of(seed, 3 + seed) for seed in range(6)] + [words_of(9, 400)]
    ask = {"max_gen_toks": 40} | settings if "max" not in str(settings) else settings
    requests = [request("generate_until", text, ask) for text in texts]
    found = exact.generate_until(requests, disable_tqdm=True)
    own = {k: v for k, v in ask.items() if k != "num_beams" and v is not None}
    theirs = reference.generate_until(
        [request("generate_until", text, own) for text in texts], disable_tqdm=True
    )
    assert found == theirs
    assert any(found)


def test_repeated_and_reordered_samples(models_: tuple[str, str]) -> None:
    settings = {"do_sample": True, "max_gen_toks": 8, "until": []}
    one, two = (request("generate_until", words_of(seed, 4), settings) for seed in (1, 2))
    model = ours(models_)
    found = model.generate_until([one, one, two], disable_tqdm=True)
    assert len(set(found)) == 3
    assert model.generate_until([two, one, one], disable_tqdm=True) == [found[2], *found[:2]]
    assert ours(models_, seed=1).generate_until([one], disable_tqdm=True) != found[:1]


def test_rules_and_their_knobs(models_: tuple[str, str], exact: EagleFsdLM) -> None:
    ask = [request("generate_until", words_of(1, 5), {"until": [], "max_gen_toks": 40})]
    (plain,) = exact.generate_until(ask, disable_tqdm=True)
    everything = ours(models_, rule="fuzzy", threshold=float("inf"), divergence="js")
    assert everything.generate_until(ask, disable_tqdm=True) != [plain]
    assert everything.get_model_info()["eagle_fsd_rule"] == "fuzzy:inf:js"
    nothing = ours(models_, rule="fuzzy:inf:js", budget=0.0)
    assert nothing.generate_until(ask, disable_tqdm=True) == [plain]


def test_generation_settings_in_our_words() -> None:
    assert generation_options({}, 256) == {"stop": [], "max_new_tokens": 256, "temperature": 0.0}
    assert generation_options({"until": ["", "x"]}, 1)["stop"] == ["x"]
    given = {"do_sample": True, "top_p": 0.9, "top_k": 5, "until": "x", "max_tokens": 3}
    assert generation_options(given, 256) == {
        "stop": ["x"],
        "max_new_tokens": 3,
        "temperature": 1.0,
        "top_p": 0.9,
        "top_k": 5,
    }
    assert generation_options({"temperature": 0.5}, 1)["temperature"] == 0.5
    assert generation_options({"temperature": 0.5, "do_sample": False}, 1)["temperature"] == 0.0
    assert generation_options({"max_gen_toks": 4, "max_new_tokens": 9}, 1)["max_new_tokens"] == 4
    for wrong in ({"repetition_penalty": 1.2}, {"num_beams": 4}, {"max_length": 9}):
        with pytest.raises(ValueError, match="unsupported generation settings"):
            generation_options(wrong, 256)
    with pytest.raises(ValueError, match="top_p must be in"):
        generation_options({"top_p": 2.0}, 256)


def test_chat_templates_without_a_system_message(exact: EagleFsdLM, reference: HFLM) -> None:
    system, user = {"role": "system", "content": "w1"}, {"role": "user", "content": "w2"}
    text = exact.apply_chat_template([system, user])
    assert text == reference.apply_chat_template([system, user]) == "<user> w2 <assistant> "
    half = [user, {"role": "assistant", "content": "w3"}]
    assert exact.apply_chat_template(half, add_generation_prompt=False).endswith("w3")
    assert exact.tokenizer_name == reference.tokenizer_name
    for string in ("w1 w2", "<s> w1", ""):
        assert exact.tok_encode(string) == reference.tok_encode(string)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"draft_head": None}, "nothing drafts: give draft_head or draft_model, or plain=true"),
        ({"batch_size": 8}, "batch_size must be 1"),
        ({"max_length": 1000}, "max_length must be in 2..256, got 1000"),
        ({"rule": "fuzy"}, "unknown acceptance rule 'fuzy'"),
        ({"plain": True, "rule": "fuzzy:0.3:js"}, "plain decoding has no tree to relax"),
        ({"tree": "6:3"}, "tree must be auto or N,DEPTH,K"),
    ],
)
def test_arguments_that_do_not_fit(
    models_: tuple[str, str], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(ValueError, match=words):
        ours(models_, **changes)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"plain": "no"}, "plain must be true or false, got 'no'"),
        ({"plain": 0}, "plain must be true or false, got 0"),
        ({"add_bos_token": "no"}, "add_bos_token must be true or false, got 'no'"),
        ({"max_length": 100.0}, "max_length must be a whole number, got 100.0"),
        ({"max_gen_toks": True}, "max_gen_toks must be a whole number, got True"),
        ({"max_gen_toks": None}, "max_gen_toks must be a whole number, got None"),
        ({"seed": "x"}, "seed must be a whole number, got 'x'"),
        ({"threshold": "x"}, "threshold must be a number, got 'x'"),
        ({"revision": 1234}, "revision must be a text, got 1234; put it in quotes"),
    ],
)
def test_arguments_of_another_kind(
    models_: tuple[str, str], changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(TypeError, match=words):
        ours(models_, **changes)


@pytest.mark.parametrize(
    ("more", "flag", "device"),
    [
        ("", "cuda:0", "auto"),  # lm-eval's own default
        ("", None, "auto"),
        ("", "cpu", "cpu"),
        ("", "cuda:1", "cuda:1"),
        (",device=cpu", "cuda:0", "cpu"),
        (",device=cuda:0", "cpu", "cuda:0"),
    ],
)
def test_a_device_of_model_args_wins_and_lm_evals_default_is_our_auto(
    monkeypatch: pytest.MonkeyPatch, more: str, flag: str | None, device: str
) -> None:
    given: dict[str, Any] = {}

    def keep(self: EagleFsdLM, **arguments: Any) -> None:
        given.clear()
        given.update({"device": "auto"} | arguments)

    monkeypatch.setattr(EagleFsdLM, "__init__", keep)
    flags = {"batch_size": 1, "max_batch_size": None, "device": flag}
    EagleFsdLM.create_from_arg_string(f"target=t,plain=true{more}", flags)
    assert given == {"target": "t", "plain": True, "batch_size": 1, "device": device}
    EagleFsdLM.create_from_arg_obj({"target": "t"} | ({"device": "cpu"} if more else {}), flags)
    assert given["device"] == ("cpu" if more else device)


def test_prompts_without_room(models_: tuple[str, str]) -> None:
    model = ours(models_, max_length=20)
    with pytest.raises(ValueError, match="answers of 20 tokens leave no room"):
        model.generate_until([request("generate_until", "w1", {"max_gen_toks": 20})], True)
    with pytest.raises(ValueError, match="has no context within 20 tokens"):
        model.loglikelihood([request("loglikelihood", "w1", words_of(0, 30))], True)


@pytest.mark.slow
def test_the_command_registers_the_model_and_hands_over(
    models_: tuple[str, str], reference: HFLM, tasks: Path, tmp_path: Path
) -> None:
    target, head = models_
    arguments = f"target={target},draft_head={head},tree=6:3:2,rule=exact,dtype=float32"
    done = subprocess.run(
        [
            *(sys.executable, "-m", "evaluation.lm_eval", "--model", "eagle_fsd"),
            *("--model_args", arguments, "--tasks", ",".join(TASKS)),
            *("--include_path", str(tasks), "--output_path", str(tmp_path)),
        ],
        cwd=REPOSITORY,
        env=os.environ
        | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "CUDA_VISIBLE_DEVICES": ""},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert any("exact_match" in line and "0.5" in line for line in done.stdout.splitlines())
    (path,) = tmp_path.rglob("results_*.json")
    results = json.loads(path.read_text())
    assert results["config"]["eagle_fsd_rule"] == "exact"
    theirs = figures(evaluate(reference, tasks))
    for name, scores in theirs.items():
        found = {key: results["results"][name][key] for key in scores}
        assert found == pytest.approx(scores, rel=1e-5)


@pytest.mark.slow
def test_lm_evals_own_models_stay_known() -> None:
    code = (
        "import evaluation.lm_eval_model, lm_eval.api.registry as r;"
        "r.get_model('eagle_fsd'); r.get_model('dummy')"
    )
    subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, check=True, capture_output=True)


def test_errors_are_told_in_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    words = sys.argv
    monkeypatch.setitem(sys.modules, "lm_eval.__main__", None)
    assert command.main(["--model", "eagle_fsd"]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.startswith("error: this needs the lm-eval package, which does not import")
    assert error.endswith("install eagle-fsd[lm-eval]")
    assert sys.argv is words


def test_help_names_our_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    words = sys.argv
    with pytest.raises(SystemExit, match="0"):
        command.main(["--help"])
    shown = capsys.readouterr().out
    assert "draft_head" in shown
    assert "--include_path" in shown
    assert sys.argv is words

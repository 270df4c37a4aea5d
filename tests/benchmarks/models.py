"""Saved models and questions for the commands."""

from __future__ import annotations

import json
import random
from pathlib import Path

from tokenizers.pre_tokenizers import WhitespaceSplit

from eagle_fsd.checkpoint import save_head
from tests.train.tiny import tiny_head, tiny_model, tiny_tokenizer


def saved(folder: Path) -> tuple[str, str, str]:
    """A target, its head, and a file of four short questions and one that fills the context."""
    tiny_model().save_pretrained(folder / "target")
    tokenizer = tiny_tokenizer()
    tokenizer.backend_tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.save_pretrained(folder / "target")
    save_head(tiny_head(), folder / "head")
    rng = random.Random(0)
    turns = [" ".join(f"w{rng.randrange(120)}" for _ in range(n)) for n in (3, 250, 5, 4, 6)]
    lines = [json.dumps({"question_id": n, "turns": [turn]}) for n, turn in enumerate(turns)]
    (folder / "questions.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder / "target"), str(folder / "head"), str(folder / "questions.jsonl")

"""What a GGUF header says that a person choosing a model wants to read."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Final

from edgellm.gguf.reader import GGUFFile
from edgellm.store.names import display_name, quant_of

TEMPLATE: Final = "tokenizer.chat_template"
NAMES: Final = (
    ("general.name", "name"),
    ("general.architecture", "architecture"),
    ("general.size_label", "size"),
    ("{arch}.block_count", "layers"),
    ("{arch}.context_length", "trained context"),
    ("{arch}.embedding_length", "embedding"),
    ("{arch}.attention.head_count", "heads"),
    ("{arch}.attention.head_count_kv", "KV heads"),
    ("{arch}.expert_count", "experts"),
    ("{arch}.expert_used_count", "experts used"),
    ("tokenizer.ggml.model", "tokenizer"),
    ("general.license", "licence"),
    ("general.organization", "made by"),
    ("general.languages", "languages"),
    ("general.base_model.0.name", "base model"),
)


def shown_name(path: str) -> str:
    """A file's name without the quantisation, which stands in a column of its own."""
    name = display_name(path)
    quant = quant_of(name)
    if quant and name.upper().endswith(quant.upper()) and len(name) > len(quant) + 1:
        return name[: -len(quant)].rstrip("-._")
    return name


def facts(file: GGUFFile) -> list[tuple[str, str]]:
    """(name, value) pairs, the chat template last."""
    arch = str(file.metadata.get("general.architecture", ""))
    pairs = [(label, _value(file.metadata, key.format(arch=arch))) for key, label in NAMES]
    pairs.append(("tensors", f"{len(file.tensors):,}"))
    pairs.append(("chat template", _template(file.metadata)))
    return [(label, value) for label, value in pairs if value]


def _value(metadata: Mapping[str, Any], key: str) -> str:
    value = metadata.get(key)
    if value is None or isinstance(value, (str, bool)):
        return str(value or "")
    if isinstance(value, int):
        return f"{value:,}"
    if hasattr(value, "decode"):
        items = list(value.decode())[:8]
        return ", ".join(str(item) for item in items)
    return str(value)


def _template(metadata: Mapping[str, Any]) -> str:
    text = str(metadata.get(TEMPLATE) or "none: plain text is continued")
    lines = text.strip().splitlines()
    rest = f"\n… {len(lines) - 12} more lines" if len(lines) > 12 else ""
    return "\n".join(lines[:12]) + rest

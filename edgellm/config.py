"""Settings: flags > EDGELLM_* variables > config.toml > profile > defaults, each with its origin.

A key is ``section.name`` (``plan.ctx``): the same name in config.toml (``[plan] ctx = 8192``), in a
profile (where ``{ value = 8192, why = "..." }`` gives the reason) and, in capitals with a prefix,
in the environment (``EDGELLM_PLAN_CTX=8192``). Only this file knows the keys; a new setting is a
new field below, nothing else.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Annotated, Any, Final, Literal, get_args, get_origin

import msgspec
from msgspec import Meta

from edgellm import paths
from edgellm.errors import ConfigError
from edgellm.units import parse_bytes

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

# Read elsewhere, not settings: where things live, tracebacks, the key a client sends.
RESERVED_VARIABLES: Final = {
    "EDGELLM_HOME",
    "EDGELLM_CONFIG",
    "EDGELLM_DEBUG",
    "EDGELLM_API_KEY",
}
SECRET_KEYS: Final = {"serve.api_key"}

# Bytes; written as 6GiB, 512MiB or a number.
Size = Annotated[int | None, Meta(extra={"size": True})]
# llama.cpp takes these as int32_t.
Positive = Annotated[int, Meta(ge=1, le=2**31 - 1)]
Natural = Annotated[int, Meta(ge=0, le=2**31 - 1)]
Sequences = Annotated[int, Meta(ge=1, le=256)]  # LLAMA_MAX_SEQ (src/llama-cparams.h)
Threads = Annotated[int, Meta(ge=1, le=512)]  # GGML_MAX_N_THREADS (ggml.h)
Seconds = Annotated[float, Meta(ge=0)]
OnOff = Literal["on", "off"]
OnOffAuto = Literal["on", "off", "auto"]


class PlanSettings(msgspec.Struct, frozen=True, kw_only=True):
    """What the planner is asked for; None lets it choose."""

    ctx: Annotated[Positive | None, Meta(description="cells for all sequences together")] = None
    parallel: Annotated[Sequences | None, Meta(description="sequences at once")] = None
    ngl: Annotated[str | None, Meta(description="layers on the GPU: N, auto or all")] = None
    batch: Annotated[Positive | None, Meta(description="tokens a decode call takes")] = None
    ubatch: Annotated[Positive | None, Meta(description="tokens computed at once")] = None
    outputs: Annotated[Natural | None, Meta(description="rows of logits reserved a step")] = None
    type_k: Annotated[str | None, Meta(description="K cache type: f16, q8_0, q4_0 ...")] = None
    type_v: Annotated[str | None, Meta(description="V cache type")] = None
    flash_attn: Annotated[OnOffAuto | None, Meta(description="flash attention")] = None
    n_cpu_moe: Annotated[
        Natural | None, Meta(description="layers whose experts stay on the host")
    ] = None
    swa_full: Annotated[bool | None, Meta(description="full-size sliding-window cache")] = None
    kv_unified: Annotated[OnOff | None, Meta(description="one cache for all sequences")] = None
    tensor_split: Annotated[str | None, Meta(description="share a card, such as 3,1")] = None
    split_mode: Annotated[
        Literal["none", "layer", "row"] | None, Meta(description="how several cards share")
    ] = None
    main_gpu: Annotated[
        Natural | None, Meta(description="the card that holds what is not split")
    ] = None
    threads: Annotated[Threads | None, Meta(description="CPU threads for decoding")] = None
    threads_batch: Annotated[Threads | None, Meta(description="CPU threads for prompts")] = None
    mmap: Annotated[bool | None, Meta(description="map the file instead of reading it")] = None
    mlock: Annotated[bool | None, Meta(description="keep the weights from being swapped")] = None
    vram: Annotated[
        tuple[str, ...], Meta(description="plan for cards with this much free memory instead")
    ] = ()
    ram: Annotated[Size, Meta(description="plan for this much free RAM instead")] = None
    worker: Annotated[
        tuple[str, ...], Meta(description="HOST:PORT of other machines that run edgellm worker")
    ] = ()
    backend: Annotated[str | None, Meta(description="cuda, vulkan, metal, rocm, cpu, rpc")] = None
    margin: Annotated[Size, Meta(description="bytes kept free a device")] = None
    overhead: Annotated[Size, Meta(description="bytes a device takes outside the buffers")] = None
    objective: Annotated[Literal["speed", "context"], Meta(description="what to prefer")] = "speed"
    min_ctx: Annotated[Positive | None, Meta(description="the smallest context to fall to")] = None
    allow_q4_kv: Annotated[bool, Meta(description="let the planner choose a q4_0 cache")] = False
    draft_model: Annotated[str | None, Meta(description="a smaller model to draft with")] = None
    mmproj: Annotated[str | None, Meta(description="the vision projector's file")] = None
    force: Annotated[bool, Meta(description="load even where it should not fit")] = False
    embeddings: Annotated[bool | None, Meta(description="embed texts instead of generating")] = None
    pooling: Annotated[
        Literal["none", "mean", "cls", "last", "rank"] | None,
        Meta(description="how an embedding is read from a text; rank scores documents"),
    ] = None


class ChatSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Sampling and the system prompt of chat and the terminal interface; None: the default."""

    model: Annotated[str | None, Meta(description="the model when none is named")] = None
    system: Annotated[str | None, Meta(description="the system prompt")] = None
    temperature: Annotated[float | None, Meta(description="0 takes the likeliest token")] = None
    top_k: Annotated[int | None, Meta(description="candidates kept; 0: all")] = None
    top_p: Annotated[float | None, Meta(description="probability mass kept")] = None
    min_p: Annotated[float | None, Meta(description="kept relative to the best")] = None
    repeat_penalty: Annotated[float | None, Meta(description="1 is off")] = None
    presence_penalty: Annotated[float | None, Meta(description="0 is off")] = None
    frequency_penalty: Annotated[float | None, Meta(description="0 is off")] = None
    seed: Annotated[int | None, Meta(description="the same seed gives the same text")] = None
    max_tokens: Annotated[int | None, Meta(description="the longest answer")] = None
    overflow: Annotated[
        Literal["error", "slide"], Meta(description="at the context's end: stop or slide")
    ] = "error"


class ServeSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The HTTP server."""

    host: Annotated[str, Meta(description="the address to listen on")] = "127.0.0.1"
    port: Annotated[int, Meta(ge=0, le=65535, description="0 takes a free one")] = 8080
    api_key: Annotated[tuple[str, ...], Meta(description="keys that clients must send")] = ()
    insecure: Annotated[bool, Meta(description="allow another address without a key")] = False
    cors_origins: Annotated[
        tuple[str, ...], Meta(description="origins browsers may call from")
    ] = ()
    max_body: Annotated[Size, Meta(description="largest request body")] = 32 * 1024 * 1024
    max_loaded: Annotated[Positive | None, Meta(description="models kept in memory at once")] = None
    ttl_s: Annotated[Seconds | None, Meta(description="seconds idle before a model unloads")] = None
    max_waiting: Annotated[Natural, Meta(description="requests that may wait")] = 256
    strict_names: Annotated[bool, Meta(description="404 for other names of the only model")] = False
    upstream: Annotated[
        tuple[str, ...], Meta(description="other servers behind this one: URL or NAME=URL")
    ] = ()
    upstream_key: Annotated[str | None, Meta(description="the API key they are sent")] = None
    upstream_limit: Annotated[
        Positive | None, Meta(description="requests that each of them gets at once")
    ] = None
    api_key_file: Annotated[str | None, Meta(description="a file of keys, one a line")] = None
    allowed_hosts: Annotated[
        tuple[str, ...], Meta(description="names the Host header may carry besides this machine's")
    ] = ()
    rate_limit: Annotated[Positive | None, Meta(description="requests a minute and key")] = None
    max_concurrent: Annotated[Positive | None, Meta(description="open requests a key")] = None
    body_timeout_s: Annotated[Seconds, Meta(description="seconds a body may take to arrive")] = 30.0
    request_timeout_s: Annotated[Seconds | None, Meta(description="seconds an answer may take")] = (
        3600.0
    )
    keepalive_s: Annotated[Seconds, Meta(description="silence before a comment on a stream")] = 10.0
    drain_s: Annotated[Seconds, Meta(description="seconds running requests get at the end")] = 30.0
    tls_cert: Annotated[str | None, Meta(description="certificate chain, PEM")] = None
    tls_key: Annotated[str | None, Meta(description="private key, PEM")] = None
    log_level: Annotated[
        Literal["debug", "info", "warning", "error"], Meta(description="how much to log")
    ] = "info"


class EngineSettings(msgspec.Struct, frozen=True, kw_only=True):
    """How the engine's loop runs; None: its default."""

    backend: Annotated[
        Literal["llama", "scripted"], Meta(description="scripted needs no model: for trials")
    ] = "llama"
    itl_target_s: Annotated[Seconds | None, Meta(description="longest gap between tokens")] = None
    step_budget: Annotated[Positive | None, Meta(description="tokens one step may carry")] = None
    spec: Annotated[
        Literal["off", "auto", "ngram", "draft"] | None, Meta(description="speculative decoding")
    ] = None
    spec_max: Annotated[
        Positive | None, Meta(description="tokens drafted a step and sequence at most")
    ] = None
    retain_prefixes: Annotated[bool | None, Meta(description="keep prompts for reuse")] = None
    warmup: Annotated[bool | None, Meta(description="run once before saying ready")] = None


class StoreSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Where models are kept and fetched from."""

    dir: Annotated[str | None, Meta(description="the folder of downloaded models")] = None
    endpoint: Annotated[str | None, Meta(description="another hub's address")] = None
    folders: Annotated[
        tuple[str, ...], Meta(description="more folders whose models are used in place")
    ] = ()
    offline: Annotated[bool, Meta(description="never use the network")] = False


class TuiSettings(msgspec.Struct, frozen=True, kw_only=True):
    """The terminal interface."""

    theme: Annotated[str | None, Meta(description="a theme's name")] = None
    animations: Annotated[bool, Meta(description="movement and blinking")] = True
    keys: Annotated[
        tuple[str, ...], Meta(description="other keys, such as chat.new=ctrl+k; ? shows the names")
    ] = ()


class Settings(msgspec.Struct, frozen=True, kw_only=True):
    """Every setting, resolved."""

    profile: Annotated[str | None, Meta(description="the profile whose values come first")] = None
    plan: PlanSettings = PlanSettings()
    chat: ChatSettings = ChatSettings()
    serve: ServeSettings = ServeSettings()
    engine: EngineSettings = EngineSettings()
    store: StoreSettings = StoreSettings()
    tui: TuiSettings = TuiSettings()


class Known(msgspec.Struct, frozen=True, kw_only=True):
    """A key that may be set: its type, its default and one line on what it does."""

    key: str
    type: Any
    default: Any
    description: str

    @property
    def variable(self) -> str:
        return "EDGELLM_" + self.key.replace(".", "_").upper()

    @property
    def is_size(self) -> bool:
        return any(isinstance(m, Meta) and (m.extra or {}).get("size") for m in _meta(self.type))

    @property
    def is_switch(self) -> bool:
        """on and off are among its words, so true and false may stand for them."""
        return any("on" in get_args(part) for part in self._parts())

    @property
    def is_text(self) -> bool:
        return str in self._parts()

    def _parts(self) -> tuple[Any, ...]:
        kind = get_args(self.type)[0] if get_origin(self.type) is Annotated else self.type
        return get_args(kind) or (kind,)


class Origin(msgspec.Struct, frozen=True, kw_only=True):
    """Where a value came from: ``default``, ``profile``, ``file``, ``variable`` or ``flag``."""

    kind: str
    detail: str = ""
    """The profile's name, the file's path, the variable or the flag."""
    why: str = ""
    """The reason a profile gives."""

    def __str__(self) -> str:
        return f"{self.kind} {self.detail}".rstrip()


class Config(msgspec.Struct, frozen=True, kw_only=True):
    """Settings together with the origin of each key."""

    settings: Settings
    origins: dict[str, Origin]

    def value(self, key: str) -> Any:
        """The resolved value of a dotted key."""
        found: Any = self.settings
        for part in key.split("."):
            found = getattr(found, part)
        return found


class ProfileFile(msgspec.Struct, frozen=True, kw_only=True):
    """A profile as it stands in its file."""

    name: str
    path: Path
    about: dict[str, Any]
    """The ``[profile]`` table: title, and what it is for."""
    values: dict[str, Any]
    """Dotted key -> value as written."""
    reasons: dict[str, str]
    """Dotted key -> why."""


class _Layer(msgspec.Struct, frozen=True, kw_only=True):
    values: Mapping[str, Any]
    origin: dict[str, Origin]


def known_keys() -> dict[str, Known]:
    """Every key that may be set, in the order of the structs above."""
    found: dict[str, Known] = {}
    for field in msgspec.structs.fields(Settings):
        if isinstance(field.type, type) and issubclass(field.type, msgspec.Struct):
            for inner in msgspec.structs.fields(field.type):
                key = f"{field.name}.{inner.name}"
                found[key] = _known(key, inner)
        else:
            found[field.name] = _known(field.name, field)
    return found


def _known(key: str, field: msgspec.structs.FieldInfo) -> Known:
    described = [
        m.description
        for m in get_args(field.type)[1:]
        if isinstance(m, Meta) and m.description is not None
    ]
    return Known(
        key=key,
        type=field.type,
        default=field.default,
        description=described[0] if described else "",
    )


def load(
    flags: Mapping[str, Any] | None = None,
    *,
    environ: Mapping[str, str] | None = None,
    file: Path | None = None,
) -> Config:
    """Resolve every setting. ``flags`` maps dotted keys to values; None means "not given".

    Raises ConfigError on an unknown key or a value of the wrong kind, and says where it stands.
    """
    keys = known_keys()
    above = [
        _file_layer(file or paths.config_file(), keys),
        _environ_layer(os.environ if environ is None else environ, keys),
        _flag_layer(flags or {}, keys),
    ]
    name = next((x.values["profile"] for x in reversed(above) if "profile" in x.values), None)
    profile = [] if not name else [_profile_layer(str(name), keys)]
    return _merge([*profile, *above], keys)


def read_profile(name: str) -> ProfileFile:
    """The profile of that name, the person's own folder before the shipped ones."""
    for folder in paths.profile_dirs():
        path = folder / f"{name}.toml"
        if paths.exists(path) and path.is_file():
            return _parse_profile(name, path)
    names = list_profiles()
    near = _nearest(name, names)
    raise ConfigError(
        f"no profile named {name!r}" + (f"; did you mean {near!r}?" if near else ""),
        hint="edgellm profile ls",
    )


def list_profiles() -> list[str]:
    """Names of all profiles, own and shipped, sorted."""
    return sorted({p.stem for folder in paths.profile_dirs() for p in folder.glob("*.toml")})


def profile_text(
    title: str, what_for: str, values: Mapping[str, Any], reasons: Mapping[str, str]
) -> str:
    """A profile file of dotted keys: each value beside why it has it."""
    lines = ["[profile]", f"title = {_toml_literal(title)}", f"for = {_toml_literal(what_for)}"]
    for section in dict.fromkeys(key.rpartition(".")[0] for key in values):
        lines += ["", f"[{section}]"]
        for key, value in values.items():
            head, _, name = key.rpartition(".")
            if head == section:
                shown, why = _toml_literal(value), _toml_literal(reasons.get(key, ""))
                lines.append(f"{name} = {{ value = {shown}, why = {why} }}")
    return "\n".join(lines) + "\n"


def write_profile(name: str, text: str) -> Path:
    """Write a profile of the person's own, whole or not at all; the place it has.

    Raises ConfigError before anything is written when the name or a key is none.
    """
    if not re.fullmatch(r"[\w.-]+", name, re.ASCII) or name.startswith("."):
        raise ConfigError(f"{name!r} is no name for a profile", hint="letters, digits, - and _")
    path = paths.config_dir() / "profiles" / f"{name}.toml"
    fresh = path.with_suffix(".toml.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh.write_text(text, encoding="utf-8")
        _check_known(_parse_profile(name, fresh).values, known_keys(), str(path))
        fresh.replace(path)
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error
    finally:
        fresh.unlink(missing_ok=True)
    return path


def value_in_file(key: str) -> Any:
    """What config.toml says for ``key`` itself; None when it is silent."""
    return _file_layer(paths.config_file(), known_keys()).values.get(key)


def set_in_file(key: str, value: str | int | float | bool | None) -> Path:
    """Set one key in config.toml (None removes it), leaving every other line as it is.

    Raises ConfigError before writing when the key or the value is wrong.
    """
    path = paths.config_file()
    value = _checked(key, value)
    if key == "profile" and value is not None:
        read_profile(str(value))  # else every later command would fail for it
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    changed = _edit(text, key, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    # Each process its own: of two at once one wins, and neither finds its file gone.
    temporary = path.with_name(f"{path.name}.{os.getpid()}.new")
    try:
        temporary.write_text(changed, encoding="utf-8")
        temporary.replace(path)
    except OSError:
        temporary.unlink(missing_ok=True)
        raise
    return path


def _checked(key: str, value: Any) -> Any:
    """``value`` of the key's own type, but a size as it was written: 6GiB reads better."""
    keys = known_keys()
    if key not in keys:
        raise _unknown(key, keys, "config.toml")
    if value is None:
        return None
    converted = _convert(keys[key], value, Origin(kind="file", detail="config.toml"))
    return value if keys[key].is_size else converted


def _edit(text: str, key: str, value: Any) -> str:
    section, _, name = key.rpartition(".")
    new = [] if value is None else [f"{name} = {_toml_literal(value)}"]
    lines = text.splitlines()
    start, end = _section_span(lines, section)
    if start is None:
        block = new if not section or not new else ["", f"[{section}]", *new]
        lines = [*lines, *block] if section else [*block, *lines]
        return "\n".join(lines).lstrip("\n") + "\n"
    body = [x for x in lines[start:end] if x.split("=")[0].strip() != name]
    return "\n".join([*lines[:start], *new, *body, *lines[end:]]) + "\n"


def _section_span(lines: list[str], section: str) -> tuple[int | None, int]:
    """Where a section's own lines begin and end; (None, _) when the file does not have it."""
    headers = [i for i, line in enumerate(lines) if line.lstrip().startswith("[")]
    if not section:
        return 0, headers[0] if headers else len(lines)
    for i, at in enumerate(headers):
        if lines[at].strip().strip("[]").strip() == section:
            return at + 1, headers[i + 1] if i + 1 < len(headers) else len(lines)
    return None, len(lines)


def _toml_literal(value: Any) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, (int, float)):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(_toml_literal(part) for part in value) + "]"
    # A JSON string is a TOML basic string, but for DEL.
    return msgspec.json.encode(str(value)).decode().replace("\x7f", "\\u007f")


def _read_toml(path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: {error}", hint=f"mend {path}") from error
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from error


def _flatten(table: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, value in table.items():
        if isinstance(value, dict):
            yield from ((f"{name}.{inner}", x) for inner, x in value.items())
        else:
            yield name, value


def _file_layer(path: Path, keys: Mapping[str, Known]) -> _Layer:
    if not path.is_file():
        return _Layer(values={}, origin={})
    values = dict(_flatten(_read_toml(path)))
    _check_known(values, keys, str(path))
    return _Layer(values=values, origin={k: Origin(kind="file", detail=str(path)) for k in values})


def _environ_layer(environ: Mapping[str, str], keys: Mapping[str, Known]) -> _Layer:
    by_variable = {known.variable: key for key, known in keys.items()}
    given = {
        name: value
        for name, value in environ.items()
        if name.startswith("EDGELLM_") and name not in RESERVED_VARIABLES
    }
    for name in given:
        if name not in by_variable:
            near = _nearest(name, [*by_variable, *RESERVED_VARIABLES])
            raise ConfigError(
                f"unknown variable {name}" + (f"; did you mean {near}?" if near else ""),
                hint="edgellm config",
            )
    return _Layer(
        values={by_variable[name]: value for name, value in given.items()},
        origin={by_variable[name]: Origin(kind="variable", detail=name) for name in given},
    )


def _flag_layer(flags: Mapping[str, Any], keys: Mapping[str, Known]) -> _Layer:
    values = {k: v for k, v in flags.items() if v is not None}
    _check_known(values, keys, "flags")
    origin = {
        k: Origin(kind="flag", detail="--" + k.rpartition(".")[2].replace("_", "-")) for k in values
    }
    return _Layer(values=values, origin=origin)


def _profile_layer(name: str, keys: Mapping[str, Known]) -> _Layer:
    profile = read_profile(name)
    _check_known(profile.values, keys, str(profile.path))
    origin = {
        key: Origin(kind="profile", detail=name, why=profile.reasons.get(key, ""))
        for key in profile.values
    }
    return _Layer(values=profile.values, origin=origin)


def _parse_profile(name: str, path: Path) -> ProfileFile:
    table = _read_toml(path)
    about = table.pop("profile", {})
    values: dict[str, Any] = {}
    reasons: dict[str, str] = {}
    for key, value in _flatten(table):
        if isinstance(value, dict) and "value" in value:
            values[key] = value["value"]
            reasons[key] = str(value.get("why", ""))
        else:
            values[key] = value
    if not isinstance(about, dict):
        raise ConfigError(f"{path}: profile must be a table", hint="edgellm profile ls")
    return ProfileFile(name=name, path=path, about=about, values=values, reasons=reasons)


def _check_known(values: Mapping[str, Any], keys: Mapping[str, Known], where: str) -> None:
    for key in values:
        if key not in keys:
            raise _unknown(key, keys, where)


def _unknown(key: str, keys: Mapping[str, Known], where: str) -> ConfigError:
    near = _nearest(key, list(keys))
    return ConfigError(
        f"{where}: unknown key {key!r}" + (f"; did you mean {near!r}?" if near else ""),
        hint="edgellm config",
    )


def _nearest(word: str, among: list[str]) -> str | None:
    import difflib  # 2 ms, and only for an error

    found = difflib.get_close_matches(word, among, n=1, cutoff=0.6)
    return found[0] if found else None


def _merge(layers: list[_Layer], keys: Mapping[str, Known]) -> Config:
    resolved: dict[str, Any] = {}
    origins = {key: Origin(kind="default") for key in keys}
    for layer in layers:
        for key, value in layer.values.items():
            resolved[key] = _convert(keys[key], value, layer.origin[key])
            origins[key] = layer.origin[key]
    tree: dict[str, Any] = {}
    for key, value in resolved.items():
        section, _, name = key.rpartition(".")
        (tree.setdefault(section, {}) if section else tree)[name] = value
    return Config(settings=msgspec.convert(tree, Settings), origins=origins)


def _convert(known: Known, value: Any, origin: Origin) -> Any:
    try:
        if isinstance(value, str) and known.is_size:
            value = parse_bytes(value)
        elif isinstance(value, str) and _is_list(known.type):
            value = [part.strip() for part in value.split(",") if part.strip()]
        elif isinstance(value, bool) and known.is_switch:
            value = "on" if value else "off"
        elif isinstance(value, int) and not isinstance(value, bool) and known.is_text:
            value = str(value)
        converted = msgspec.convert(value, known.type, strict=False)
        if isinstance(converted, float) and not math.isfinite(converted):
            raise ValueError(f"expected a number, got {value!r}")
        return converted
    except (msgspec.ValidationError, ValueError) as error:
        raise ConfigError(
            f"{known.key} ({origin}): {_plain(error, value)}",
            hint="edgellm config",
        ) from error


def _plain(error: Exception, value: Any) -> str:
    """What msgspec or parse_bytes found wrong, in a person's words."""
    if not isinstance(error, msgspec.ValidationError):
        return str(error)
    expected = str(error).partition(", got ")[0].replace("`", "").replace(" | null", "")
    return f"{expected[:1].lower()}{expected[1:]}, got {value!r}"


def _meta(kind: Any) -> Iterator[Any]:
    if get_origin(kind) is Annotated:
        inner, *rest = get_args(kind)
        yield from rest
        yield from _meta(inner)


def _is_list(kind: Any) -> bool:
    return get_origin(get_args(kind)[0] if get_origin(kind) is Annotated else kind) is tuple

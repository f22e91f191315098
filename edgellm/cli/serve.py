"""``edgellm serve``: models behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import gc
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Group, Parameter

from edgellm import config, paths
from edgellm.cli.answer import sampling
from edgellm.cli.errors import UsageError
from edgellm.cli.flags import PlanFlags, SamplingFlags
from edgellm.config import ServeSettings, Settings
from edgellm.errors import ConfigError, ModelNotFoundError
from edgellm.request import Overflow, Priority
from edgellm.runtime import ModelSpec, local_path, make_runtime
from edgellm.server import access
from edgellm.server.core import Limits, Options, Server
from edgellm.server.run import Bind, open_sockets, run
from edgellm.server.run import serve as run_server
from edgellm.server.statefile import StateFile
from edgellm.server.upstream.replicas import Upstreams, UpstreamSpec
from edgellm.store import local
from edgellm.units import parse_bytes
from edgellm.workers import Pool

DEFAULT_PARALLEL: Final = 8
_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")


_ACCESS = Group("Access", sort_key=10)
_MODELS = Group("Models", sort_key=11)
_LIMITS = Group("Limits", sort_key=12)
_MANY = {"consume_multiple": False, "negative": ()}


@Parameter(name="*")
@dataclass(frozen=True, kw_only=True)
class ServeFlags:
    """How to serve. Most flags are also settings: serve.NAME in config.toml."""

    host: Annotated[list[str] | None, Parameter(group=_ACCESS, **_MANY)] = None
    """The address to listen on; repeat it for several. Default 127.0.0.1."""
    port: Annotated[int | None, Parameter(group=_ACCESS)] = None
    """Default 8080; 0 takes a free one."""
    api_key: Annotated[list[str] | None, Parameter(group=_ACCESS, **_MANY)] = None
    """KEY or NAME:KEY that clients must send; repeat it for several."""
    api_key_file: Annotated[str | None, Parameter(group=_ACCESS)] = None
    """A file of such keys, one a line."""
    insecure: Annotated[bool | None, Parameter(group=_ACCESS, negative=())] = None
    """Allow an address that others can reach without any key."""
    cors_origin: Annotated[list[str] | None, Parameter(group=_ACCESS, **_MANY)] = None
    """An origin whose pages may call; repeat it, or localhost, or *."""
    allowed_host: Annotated[list[str] | None, Parameter(group=_ACCESS, **_MANY)] = None
    """Another name that the Host header may carry (a proxy's), or *."""
    tls_cert: Annotated[str | None, Parameter(group=_ACCESS)] = None
    """Certificate chain (PEM), for HTTPS."""
    tls_key: Annotated[str | None, Parameter(group=_ACCESS)] = None
    """Its private key (PEM)."""
    ui: Annotated[bool, Parameter(group=_ACCESS, negative="--no-ui")] = True
    """The page at /."""
    alias: Annotated[list[str] | None, Parameter(group=_MODELS, **_MANY)] = None
    """NAME=MODEL, or with one model just NAME. The name * answers to every unknown name."""
    strict_names: Annotated[bool | None, Parameter(group=_MODELS, negative=())] = None
    """Answer an unknown model name with 404 where just one model is named too. Without it that one
    answers to every name."""
    upstream: Annotated[list[str] | None, Parameter(group=_MODELS, **_MANY)] = None
    """Another OpenAI-compatible server behind this port: URL, NAME=URL or NAME=URL#MODEL.
    Repeat it; servers of one model share its requests."""
    upstream_key: Annotated[str | None, Parameter(group=_MODELS)] = None
    """The API key that upstream servers are sent."""
    upstream_limit: Annotated[int | None, Parameter(group=_MODELS)] = None
    """Requests that each upstream gets at once; the others wait here, the urgent ones in front."""
    preload: Annotated[bool | None, Parameter(group=_MODELS, negative="--no-preload")] = None
    """Load the first model before saying ready. Default: when there is just one."""
    ttl: Annotated[float | None, Parameter(group=_MODELS)] = None
    """Unload a model after so many seconds without a request."""
    max_loaded: Annotated[int | None, Parameter(group=_MODELS)] = None
    """Models in memory at once."""
    engine: Annotated[Literal["llama", "scripted"] | None, Parameter(group=_MODELS)] = None
    """scripted runs without a model's weights: made-up text, for tests of clients and load."""
    overflow: Annotated[Literal["error", "slide"] | None, Parameter(group=_MODELS)] = None
    """At the end of the context: an error, or slide over the oldest turns."""
    priority: Annotated[Literal["interactive", "normal", "batch"], Parameter(group=_MODELS)] = (
        "normal"
    )
    """Of requests that name none."""
    max_waiting: Annotated[int | None, Parameter(group=_LIMITS)] = None
    """Requests that may wait for a model's engine."""
    max_body: Annotated[str | None, Parameter(group=_LIMITS)] = None
    """The largest request body, such as 32MiB."""
    rate_limit: Annotated[int | None, Parameter(group=_LIMITS)] = None
    """Requests a minute for each key."""
    max_concurrent: Annotated[int | None, Parameter(group=_LIMITS)] = None
    """Open requests for each key."""
    timeout: Annotated[float | None, Parameter(group=_LIMITS)] = None
    """Seconds that one answer may take."""
    drain: Annotated[float | None, Parameter(group=_LIMITS)] = None
    """Seconds that running requests get when the server is told to stop."""
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), group=_LIMITS, negative=())] = False
    """No line for each request."""

    def settings(self) -> dict[str, Any]:
        """The flags that were given, as dotted keys for ``config.load``."""
        return {
            "chat.overflow": self.overflow,
            "engine.backend": self.engine,
            "serve.host": ",".join(self.host) if self.host else None,
            "serve.port": self.port,
            "serve.api_key": tuple(self.api_key) if self.api_key else None,
            "serve.api_key_file": self.api_key_file,
            "serve.insecure": self.insecure,
            "serve.cors_origins": tuple(self.cors_origin) if self.cors_origin else None,
            "serve.allowed_hosts": tuple(self.allowed_host) if self.allowed_host else None,
            "serve.upstream": tuple(self.upstream) if self.upstream else None,
            "serve.upstream_key": self.upstream_key,
            "serve.upstream_limit": self.upstream_limit,
            "serve.strict_names": self.strict_names,
            "serve.ttl_s": self.ttl,
            "serve.max_loaded": self.max_loaded,
            "serve.max_waiting": self.max_waiting,
            "serve.max_body": None if self.max_body is None else _size(self.max_body),
            "serve.rate_limit": self.rate_limit,
            "serve.max_concurrent": self.max_concurrent,
            "serve.request_timeout_s": self.timeout,
            "serve.drain_s": self.drain,
            "serve.tls_cert": self.tls_cert,
            "serve.tls_key": self.tls_key,
        }


def serve(
    models: Annotated[list[str] | None, Parameter(negative=())] = None,
    /,
    *,
    flags: ServeFlags = ServeFlags(),
    sampling_flags: SamplingFlags = SamplingFlags(),  # noqa: B008 (frozen)
    plan_flags: PlanFlags = PlanFlags(),  # noqa: B008 (frozen)
) -> None:
    """Serve models over OpenAI's, Anthropic's and llama-server's APIs.

    One model is loaded at once; of several each is loaded when it is first asked for, and those
    that were not used longest go when another needs the memory. SIGTERM or Ctrl-C lets running
    requests finish, then ends with exit code 0. `edgellm config` prints what a flag is when it is
    not given.

    Examples, one a line:

    * `edgellm serve starter`
    * `edgellm serve small.gguf large.gguf --ttl 600`
    * `edgellm serve starter --host 0.0.0.0 --api-key work:sk-...`

    Parameters
    ----------
    models
        Paths, names in the store, hf: references already downloaded, or a folder. None: every
        model on this machine.
    """
    given = {**plan_flags.settings(), **sampling_flags.settings(), **flags.settings()}
    settings = with_parallel(config.load(given).settings)
    upstreams = upstreams_of(settings.serve, flags.alias or [])
    # With other servers to serve, no model named means none of this machine's.
    found = [] if upstreams is not None and not models else find_models(models or [], settings)
    specs = with_aliases(found, _local_aliases(flags.alias or [], found, upstreams))
    if models and upstreams is None and not settings.serve.strict_names:
        specs = answering_any_name(specs)
    state = StateFile()
    bind = bind_of(settings.serve)
    options = options_of(
        settings, bind, state, quiet=flags.quiet, priority=flags.priority, ui=flags.ui
    )
    first = flags.preload if flags.preload is not None else len(specs) == 1
    run(_serve(specs, settings, options, bind, state, preload=first, upstreams=upstreams))


async def _serve(
    specs: Sequence[ModelSpec],
    settings: Settings,
    options: Options,
    bind: Bind,
    state: StateFile,
    *,
    preload: bool,
    upstreams: Upstreams | None = None,
) -> None:
    # The port first: it fails at once, where loading may take minutes.
    sockets = open_sockets(bind)
    if specs:
        # Later a worker that is gone is done without; one that never was is most likely a mistake.
        Pool(settings.plan.worker).require()
    server = Server(make_runtime(specs, settings), options, upstreams)
    names = ", ".join(spec.name for spec in specs[:6]) + (", ..." if len(specs) > 6 else "")

    def ready(url: str) -> None:
        # What is loaded by now stays: a full collection in mid-stream would walk all of it.
        gc.collect()
        gc.freeze()
        gc.set_threshold(20_000, 20, 50)
        print(f"serving {_shown(names, upstreams)} at {url}/v1", flush=True)

    await run_server(
        server,
        bind,
        sockets=sockets,
        on_ready=ready,
        state=state,
        preload=[specs[0].name] if preload else [],
    )


def _shown(names: str, upstreams: Upstreams | None) -> str:
    """The models for the line that says what is served, and which upstreams do not answer."""
    if upstreams is None:
        return names
    for replica in upstreams.replicas:
        if not replica.is_up:
            print(f"edgellm: warning: {replica.error}; it is asked again", file=sys.stderr)
    return ", ".join([*([names] if names else []), *upstreams.groups]) or "nothing yet"


def upstreams_of(serve: ServeSettings, aliases: Sequence[str]) -> Upstreams | None:
    """The other servers that the settings name, or None."""
    if not serve.upstream:
        return None
    pairs = [text.split("=", 1) for text in aliases if "=" in text]
    return Upstreams(
        [UpstreamSpec.parse(text) for text in serve.upstream],
        key=serve.upstream_key,
        limit=serve.upstream_limit,
        max_waiting=serve.max_waiting,
        aliases=[(n.strip(), target) for names, target in pairs for n in names.split(",")],
    )


def _local_aliases(
    aliases: Sequence[str], specs: Sequence[ModelSpec], upstreams: Upstreams | None
) -> list[str]:
    """The aliases of this machine's models; what upstreams have is not known yet."""
    if upstreams is None:
        return list(aliases)
    names = {name for spec in specs for name in (spec.name, spec.ref, *spec.aliases)}
    return [text for text in aliases if text.partition("=")[2] in names]


def with_parallel(settings: Settings) -> Settings:
    """A server's default for ``plan.parallel``: one cache is shared, so places cost little."""
    if settings.plan.parallel is not None:
        return settings
    plan = msgspec.structs.replace(settings.plan, parallel=DEFAULT_PARALLEL)
    return msgspec.structs.replace(settings, plan=plan)


def _size(text: str) -> int:
    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"--max-body: {error}") from error


def bind_of(serve: ServeSettings) -> Bind:
    """Where to listen, as the settings say."""
    return Bind(
        hosts=tuple(h.strip() for h in serve.host.split(",") if h.strip()),
        port=serve.port,
        tls_cert=serve.tls_cert,
        tls_key=serve.tls_key,
        drain_s=serve.drain_s,
    )


def options_of(
    settings: Settings, bind: Bind, state: StateFile, *, quiet: bool, priority: str, ui: bool = True
) -> Options:
    """The server's options. Raises ConfigError for an open address without a key."""
    serve = settings.serve
    keys = [access.make_key(text) for text in serve.api_key]
    if serve.api_key_file is not None:
        keys += access.read_keys(paths.expand(serve.api_key_file))
    if not bind.hosts:
        raise ConfigError("serve.host names no address", hint="--host 127.0.0.1")
    check_exposure(bind.hosts, has_keys=bool(keys), insecure=serve.insecure)
    hosts = access.allowed_hosts(bind.hosts, keys, serve.allowed_hosts)
    if keys:
        # What ps and stop on this machine send; without keys they need none.
        keys.append(access.make_key(state.token, "edgellm-local"))
    policy = access.Policy(
        keys=tuple(keys),
        hosts=hosts,
        origins=serve.cors_origins,
        rate_per_minute=serve.rate_limit,
        max_concurrent=serve.max_concurrent,
    )
    limits = Limits(
        max_body=serve.max_body or Limits().max_body,
        body_timeout_s=serve.body_timeout_s,
        request_timeout_s=serve.request_timeout_s,
        keepalive_s=serve.keepalive_s,
    )
    return Options(
        policy=policy,
        limits=limits,
        sampling=sampling(settings.chat),
        priority=Priority[priority.upper()],
        overflow=Overflow(settings.chat.overflow),
        log_requests=not quiet and serve.log_level in ("debug", "info"),
        ui=ui,
    )


def check_exposure(hosts: Sequence[str], *, has_keys: bool, insecure: bool) -> None:
    """Refuse to serve others without a key, unless that was asked for."""
    exposed = [host for host in hosts if not access.is_loopback(host)]
    if exposed and not has_keys and not insecure:
        raise ConfigError(
            f"{exposed[0]} can be reached by others and no API key is set",
            hint="add --api-key KEY (or --insecure, if everyone there may use this machine)",
        )
    if exposed and not has_keys:
        print(
            f"edgellm: warning: everyone who reaches {exposed[0]} may use this server",
            file=sys.stderr,
        )


def find_models(names: Sequence[str], settings: Settings) -> list[ModelSpec]:
    """The models to serve, each found on this machine. Raises ModelNotFoundError."""
    if not names:
        found = [_spec(m.name, str(m.path), m.aliases) for m in local.list_models(settings.store)]
        if not found:
            raise ModelNotFoundError("no model is on this machine", hint="edgellm pull starter")
        return _distinct(found)
    specs: list[ModelSpec] = []
    for name in names:
        folder = paths.expand(name)
        specs += _in_folder(folder) if os.path.isdir(folder) else [_named(name, settings)]
    return _distinct(specs)


def _named(name: str, settings: Settings) -> ModelSpec:
    path = local_path(name, settings)
    public = path_name(path) if _is_path(name) else name.removeprefix("hf:")
    return _spec(public, name, (name, path_name(path), path.name))


def _is_path(name: str) -> bool:
    return name.endswith(".gguf") or os.path.isfile(paths.expand(name))


def path_name(path: Path) -> str:
    """A file's name without .gguf and shard number."""
    return _SHARD.sub("", path.name.removesuffix(".gguf"))


def _in_folder(folder: Path) -> list[ModelSpec]:
    """Every model of a folder: first shards, no projectors."""
    found = []
    for path in sorted(folder.glob("**/*.gguf")):
        shard = _SHARD.search(path.name.removesuffix(".gguf"))
        if path.name.startswith("mmproj") or (shard and int(shard[1]) != 1):
            continue
        found.append(_spec(path_name(path), str(path), (path.name,)))
    if not found:
        raise ModelNotFoundError(f"no .gguf file in {folder}", hint="edgellm ls")
    return found


def _spec(name: str, ref: str, aliases: Sequence[str]) -> ModelSpec:
    others = tuple(dict.fromkeys(alias for alias in aliases if alias != name))
    return ModelSpec(name=name, ref=ref, aliases=others)


def _distinct(specs: Sequence[ModelSpec]) -> list[ModelSpec]:
    """The same file once; two files of one name by their whole path."""
    by_name: dict[str, ModelSpec] = {}
    for spec in specs:
        known = by_name.get(spec.name)
        if known is None:
            by_name[spec.name] = spec
        elif known.ref != spec.ref:
            by_name[spec.ref] = _spec(spec.ref, spec.ref, ())
    return list(by_name.values())


def with_aliases(specs: Sequence[ModelSpec], aliases: Sequence[str]) -> list[ModelSpec]:
    """``specs`` with the names that --alias gives; the first alias of a model is its new name."""
    built = {spec.name: spec for spec in specs}
    for text in aliases:
        alias, equals, target = text.partition("=")
        if not equals and len(specs) > 1:
            raise UsageError(f"--alias {text}: say which model, as {text}=MODEL")
        wanted = target or specs[0].name
        key = next((k for k, s in built.items() if wanted in (k, s.name, s.ref, *s.aliases)), None)
        if key is None:
            raise UsageError(f"--alias {text}: no model {wanted!r} is served")
        for name in alias.split(","):
            built[key] = _renamed(built[key], name.strip(), is_name=not equals)
    return list(built.values())


def answering_any_name(specs: Sequence[ModelSpec]) -> list[ModelSpec]:
    """A model that was named alone, under every name: clients have names built in, and agents ask
    for a second, smaller model by a name of their own."""
    if len(specs) != 1 or "*" in specs[0].aliases:
        return list(specs)
    return [msgspec.structs.replace(specs[0], aliases=(*specs[0].aliases, "*"))]


def _renamed(spec: ModelSpec, alias: str, *, is_name: bool) -> ModelSpec:
    """``--alias NAME`` alone is llama-server's way to say what the one model is called."""
    if is_name and alias != "*":
        return _spec(alias, spec.ref, (*spec.aliases, spec.name))
    return _spec(spec.name, spec.ref, (*spec.aliases, alias))

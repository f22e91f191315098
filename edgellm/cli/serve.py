"""``edgellm serve``: models behind OpenAI's and Anthropic's APIs."""

from __future__ import annotations

import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import msgspec
from cyclopts import Parameter

from edgellm import config
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
from edgellm.store import local
from edgellm.units import parse_bytes

DEFAULT_PARALLEL: Final = 8
_SHARD = re.compile(r"-(\d{5})-of-\d{5}$")


def serve(
    models: Annotated[list[str] | None, Parameter(negative=())] = None,
    /,
    *,
    host: Annotated[list[str] | None, Parameter(consume_multiple=False, negative=())] = None,
    port: int | None = None,
    api_key: Annotated[list[str] | None, Parameter(consume_multiple=False, negative=())] = None,
    api_key_file: str | None = None,
    insecure: Annotated[bool | None, Parameter(negative=())] = None,
    cors_origin: Annotated[list[str] | None, Parameter(consume_multiple=False, negative=())] = None,
    allowed_host: Annotated[
        list[str] | None, Parameter(consume_multiple=False, negative=())
    ] = None,
    alias: Annotated[list[str] | None, Parameter(consume_multiple=False, negative=())] = None,
    preload: Annotated[bool | None, Parameter(negative="--no-preload")] = None,
    ttl: float | None = None,
    max_loaded: int | None = None,
    max_waiting: int | None = None,
    max_body: str | None = None,
    rate_limit: int | None = None,
    max_concurrent: int | None = None,
    timeout: float | None = None,
    drain: float | None = None,
    tls_cert: str | None = None,
    tls_key: str | None = None,
    overflow: Literal["error", "slide"] | None = None,
    priority: Literal["interactive", "normal", "batch"] = "normal",
    engine: Literal["llama", "scripted"] | None = None,
    quiet: Annotated[bool, Parameter(name=("--quiet", "-q"), negative=())] = False,
    ui: bool = True,
    sampling_flags: SamplingFlags = SamplingFlags(),  # noqa: B008 (frozen)
    plan_flags: PlanFlags = PlanFlags(),  # noqa: B008 (frozen)
) -> None:
    """Serve models over OpenAI's, Anthropic's and llama-server's APIs.

    One model is loaded at once; of several each is loaded when it is first asked for, and those
    that were not used longest go when another needs the memory. SIGTERM or Ctrl-C lets running
    requests finish, then ends with exit code 0.

    Examples: `edgellm serve starter`, `edgellm serve small.gguf large.gguf --ttl 600`,
    `edgellm serve starter --host 0.0.0.0 --api-key work:sk-...`

    Parameters
    ----------
    models
        Paths, names in the store, hf: references already downloaded, or a folder. None: every
        model on this machine.
    host
        The address to listen on; repeat it for several. Default 127.0.0.1.
    port
        Default 8080; 0 takes a free one.
    api_key
        KEY or NAME:KEY that clients must send; repeat it for several.
    api_key_file
        A file of such keys, one a line.
    insecure
        Allow an address that others can reach without any key.
    cors_origin
        An origin whose pages may call; repeat it, or localhost, or *.
    allowed_host
        Another name that the Host header may carry (a proxy's), or *.
    alias
        NAME=MODEL, or with one model just NAME. The name * answers to every unknown name.
    preload
        Load the first model before saying ready. Default: when there is just one.
    ttl
        Unload a model after so many seconds without a request.
    max_loaded
        Models in memory at once.
    max_waiting
        Requests that may wait for a model's engine.
    max_body
        The largest request body, such as 32MiB.
    rate_limit
        Requests a minute for each key.
    max_concurrent
        Open requests for each key.
    timeout
        Seconds that one answer may take.
    drain
        Seconds that running requests get when the server is told to stop.
    tls_cert
        Certificate chain (PEM), for HTTPS.
    tls_key
        Its private key (PEM).
    overflow
        At the end of the context: an error, or slide over the oldest turns.
    priority
        Of requests that name none.
    engine
        scripted runs without a model's weights: made-up text, for tests of clients and load.
    quiet
        No line for each request.
    ui
        The page at /.
    """
    flags: dict[str, Any] = {
        **plan_flags.settings(),
        **sampling_flags.settings(),
        "chat.overflow": overflow,
        "engine.backend": engine,
        "serve.host": ",".join(host) if host else None,
        "serve.port": port,
        "serve.api_key": tuple(api_key) if api_key else None,
        "serve.api_key_file": api_key_file,
        "serve.insecure": insecure,
        "serve.cors_origins": tuple(cors_origin) if cors_origin else None,
        "serve.allowed_hosts": tuple(allowed_host) if allowed_host else None,
        "serve.ttl_s": ttl,
        "serve.max_loaded": max_loaded,
        "serve.max_waiting": max_waiting,
        "serve.max_body": None if max_body is None else _size(max_body),
        "serve.rate_limit": rate_limit,
        "serve.max_concurrent": max_concurrent,
        "serve.request_timeout_s": timeout,
        "serve.drain_s": drain,
        "serve.tls_cert": tls_cert,
        "serve.tls_key": tls_key,
    }
    settings = with_parallel(config.load(flags).settings)
    specs = with_aliases(find_models(models or [], settings), alias or [])
    state = StateFile()
    bind = bind_of(settings.serve)
    options = options_of(settings, bind, state, quiet=quiet, priority=priority, ui=ui)
    first = preload if preload is not None else len(specs) == 1
    run(_serve(specs, settings, options, bind, state, preload=first))


async def _serve(
    specs: Sequence[ModelSpec],
    settings: Settings,
    options: Options,
    bind: Bind,
    state: StateFile,
    *,
    preload: bool,
) -> None:
    # The port first: it fails at once, where loading may take minutes.
    sockets = open_sockets(bind)
    server = Server(make_runtime(specs, settings), options)
    names = ", ".join(spec.name for spec in specs[:6]) + (", ..." if len(specs) > 6 else "")

    def ready(url: str) -> None:
        print(f"serving {names} at {url}/v1", flush=True)

    await run_server(
        server,
        bind,
        sockets=sockets,
        on_ready=ready,
        state=state,
        preload=[specs[0].name] if preload else [],
    )


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
        keys += access.read_keys(Path(serve.api_key_file).expanduser())
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
        folder = Path(name).expanduser()
        specs += _in_folder(folder) if folder.is_dir() else [_named(name, settings)]
    return _distinct(specs)


def _named(name: str, settings: Settings) -> ModelSpec:
    path = local_path(name, settings)
    public = path_name(path) if _is_path(name) else name.removeprefix("hf:")
    return _spec(public, name, (name, path_name(path), path.name))


def _is_path(name: str) -> bool:
    return name.endswith(".gguf") or Path(name).expanduser().is_file()


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


def _renamed(spec: ModelSpec, alias: str, *, is_name: bool) -> ModelSpec:
    """``--alias NAME`` alone is llama-server's way to say what the one model is called."""
    if is_name and alias != "*":
        return _spec(alias, spec.ref, (*spec.aliases, spec.name))
    return _spec(spec.name, spec.ref, (*spec.aliases, alias))

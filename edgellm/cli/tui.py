"""``edgellm`` alone: the terminal interface."""

from __future__ import annotations

import sys
from typing import Annotated

from cyclopts import Parameter

from edgellm.cli.errors import UsageError
from edgellm.cli.flags import PlanFlags, SamplingFlags


def tui(
    model: str | None = None,
    /,
    *,
    attach: str | None = None,
    api_key: Annotated[str | None, Parameter(env_var="EDGELLM_API_KEY")] = None,
    sampling_flags: SamplingFlags = SamplingFlags(),  # noqa: B008 (frozen)
    plan_flags: PlanFlags = PlanFlags(),  # noqa: B008 (frozen)
) -> int:
    """Choose a model, see its plan, chat, watch: the terminal interface.

    Without MODEL it opens where you choose one. With --attach it chats with and watches a server
    that runs already.

    Examples, one a line:

    * `edgellm`
    * `edgellm tui starter`
    * `edgellm tui --vram 6GiB`
    * `edgellm tui --attach http://127.0.0.1:8080`

    Parameters
    ----------
    model
        Load this model at once: a path, a name in the store, or starter.
    attach
        The address of a running server.
    api_key
        The key that the server wants.
    """
    if not (sys.stdout.isatty() and sys.stdin.isatty()):
        raise UsageError("the terminal interface needs a terminal", hint="edgellm chat MODEL")
    from edgellm.tui.app import EdgeApp
    from edgellm.tui.services import make_services

    services = make_services({**plan_flags.settings(), **sampling_flags.settings()})
    app = EdgeApp(services, model=model, attach=attach, api_key=api_key)
    code = app.run() or app.return_code or 0
    if app.failure is not None:
        raise app.failure
    return code

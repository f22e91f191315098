"""What the anthropic client expects of a server, through another one."""

from tests.server.test_anthropic_sdk import *  # noqa: F403

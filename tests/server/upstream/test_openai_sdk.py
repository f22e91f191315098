"""What the openai client expects of a server, through another one."""

from tests.server.test_openai_sdk import *  # noqa: F403

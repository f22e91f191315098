"""litellm: as an OpenAI-compatible and as an Anthropic server, whole and streamed."""

import sys

import litellm

messages = [{"role": "user", "content": "What is the capital of France? Answer in one sentence."}]
same = {"messages": messages, "api_key": "none", "max_tokens": 40, "temperature": 0}
whole = litellm.completion(model="openai/starter", api_base=sys.argv[1] + "/v1", **same)
assert "Paris" in whole.choices[0].message.content
assert whole.usage.total_tokens > 0
stream = litellm.completion(
    model="openai/starter", api_base=sys.argv[1] + "/v1", stream=True, **same
)
assert "Paris" in "".join(chunk.choices[0].delta.content or "" for chunk in stream)
claude = litellm.completion(model="anthropic/starter", api_base=sys.argv[1], **same)
assert "Paris" in claude.choices[0].message.content
try:
    litellm.completion(model="openai/nothing", api_base=sys.argv[1] + "/v1", **same)
except litellm.NotFoundError:
    pass
else:
    raise AssertionError("an unknown model was answered")

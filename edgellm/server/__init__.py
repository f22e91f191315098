"""HTTP: OpenAI's and Anthropic's APIs, and llama-server's own, over one Runtime."""

"""The engine: a model in a child process, many sequences at once.

``client.Engine`` is its door. The line a request follows: client -> worker (framing, tokens) ->
loop -> scheduler (a step) -> backend (decode, sample) -> output (text, events) -> client.
"""

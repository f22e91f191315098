#!/usr/bin/env python3
"""A load client of its own for any OpenAI-compatible server: nothing of edgellm is in it.

    python benchmarks/plain_load.py URL -c 1,8 -n 32 --prompt-words 100 --max-tokens 64 [--chat]

It is here to be disagreed with: `benchmarks/agreement.py` holds `edgellm bench` against it.
Fixed-length streaming requests, every prompt distinct but for --shared-words, one warm-up round a
level; one JSON line a level. A percentile is a request's own value, the next above. Needs aiohttp.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from typing import Any

import aiohttp

TEXT = (
    "time person year way day thing man world life hand part child eye woman place work week case "
    "point company number group problem fact water money story month right study book word "
    "business issue side kind head house service friend father power hour game line end member "
    "law car city name team minute idea body back parent face level office door health person art "
    "war history party result change morning reason research girl guy moment air teacher force "
    "education"
)
WORDS = TEXT.split()
Answer = dict[str, Any]


def body_of(args: argparse.Namespace, name: str) -> dict[str, Any]:
    """A request whose prompt nobody else has."""
    own, shared = random.Random(f"{args.seed}-{name}"), random.Random("shared")
    words = [shared.choice(WORDS) for _ in range(args.shared_words)]
    words += [name, *(own.choice(WORDS) for _ in range(args.prompt_words))]
    text = " ".join(words)
    body = {
        "model": args.model,
        "max_tokens": args.max_tokens,
        "temperature": 0.8,
        "stream": True,
        "ignore_eos": True,
        "stream_options": {"include_usage": True},
    }
    turn = {"messages": [{"role": "user", "content": text}]} if args.chat else {"prompt": text}
    return {**body, **turn}


async def ask(session: aiohttp.ClientSession, args: argparse.Namespace, name: str) -> Answer:
    """One answer: ttft, tpot, n events with text, tokens by usage; or err."""
    path = "/v1/chat/completions" if args.chat else "/v1/completions"
    body = body_of(args, name)
    times: list[float] = []
    usage: dict[str, Any] = {}
    begin = time.perf_counter()
    async with session.post(args.url + path, json=body) as reply:
        if reply.status != 200:
            return {"err": f"{reply.status} {(await reply.text())[:200]}"}
        async for line in reply.content:
            if not line.startswith(b"data: ") or line.startswith(b"data: [DONE]"):
                continue
            now, event = time.perf_counter(), json.loads(line[6:])
            if event.get("error"):
                return {"err": str(event["error"])[:200]}
            usage = event.get("usage") or usage
            if has_text(event):
                times.append(now)
    if not times:
        return {"err": "no token"}
    tokens = usage.get("completion_tokens") or len(times)
    return {
        "ttft": times[0] - begin,
        "tpot": (times[-1] - times[0]) / max(1, tokens - 1),
        "n": len(times),
        "prompt": usage.get("prompt_tokens"),
        "cached": (usage.get("prompt_tokens_details") or {}).get("cached_tokens"),
    }


def has_text(event: dict[str, Any]) -> bool:
    """Whether a reader would see something new."""
    choices = event.get("choices") or []
    first = choices[0] if choices else {}
    return bool(first.get("text") or (first.get("delta") or {}).get("content"))


async def level(session: aiohttp.ClientSession, args: argparse.Namespace, at_once: int) -> Answer:
    """One concurrency, after a warm-up of up to four requests."""
    gate = asyncio.Semaphore(at_once)

    async def one(name: str) -> Answer:
        async with gate:
            return await ask(session, args, name)

    await asyncio.gather(*(one(f"w{at_once}-{i}") for i in range(min(at_once, 4))))
    n, begin = args.n or 4 * at_once, time.perf_counter()
    answers = await asyncio.gather(*(one(f"{at_once}-{i}") for i in range(n)))
    return figures(answers, at_once, time.perf_counter() - begin)


def figures(answers: list[Answer], at_once: int, wall: float) -> Answer:
    """One line: rates over the wall clock, times in milliseconds."""
    good = [a for a in answers if "err" not in a]
    if not good:
        raise SystemExit(f"all failed: {answers[0]['err']}")

    def at(name: str, share: float) -> float:
        ordered: list[float] = sorted(a[name] for a in good)
        return round(1e3 * ordered[min(len(ordered) - 1, int(share * len(ordered)))], 2)

    return {
        "conc": at_once,
        "n": len(answers),
        "err": len(answers) - len(good),
        "wall": round(wall, 2),
        "out_tps": round(sum(a["n"] for a in good) / wall, 1),
        "rps": round(len(good) / wall, 3),
        **{f"{k}_p{p}": at(k, p / 100) for k in ("ttft", "tpot") for p in (50, 99)},
        "prompt": good[0]["prompt"],
        "cached": good[-1]["cached"],
    }


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser()
    parser.add_argument("url")
    parser.add_argument("--model", default="m")
    parser.add_argument("-c", default="1,8")
    parser.add_argument("-n", type=int, default=0, help="requests a level, default 4 x concurrency")
    parser.add_argument("--prompt-words", type=int, default=100)
    parser.add_argument("--shared-words", type=int, default=0)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--chat", action="store_true")
    parser.add_argument("--seed", default="s")
    return parser.parse_args()


async def main() -> None:
    args = parse()
    limit = aiohttp.ClientTimeout(total=600)
    connector = aiohttp.TCPConnector(limit=0, force_close=True)
    async with aiohttp.ClientSession(timeout=limit, connector=connector) as session:
        for at_once in map(int, args.c.split(",")):
            print(json.dumps(await level(session, args, at_once)), flush=True)


if __name__ == "__main__":
    asyncio.run(main())

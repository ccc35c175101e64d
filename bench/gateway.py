"""What `longtail gateway` costs, on one core: added latency, requests a second, and many open streams.

The gateway has core 0 for itself; a fake upstream that answers at once and the load share core 1. Requests are chat
completions with questions of examples/gsm8k_sample.jsonl, ranked by the built-in ranker.

overhead   50 requests/s (Poisson) straight to the upstream, through a gateway in tag mode, and through one in hold
           mode, interleaved; with one JSON answer, and with a stream of 16 events. Added latency is the difference of
           the same percentile over all rounds; the first second of a round, which opens connections, does not count.
rate       500 requests/s of one token, evenly spaced.
streams    2,000 streams at once, which get an event every 5 seconds.

Percentiles of this bench are at the client, so the client's own work (the same in all arms) is in them.
"""

from __future__ import annotations

import asyncio
import json
import os
import resource
import sys
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import uvloop

sys.path.insert(0, str(Path(__file__).resolve().parent))
import common
import serve_load as load
from serve_load import Answer, Ask, Server

MODES = ("tag", "hold")
GAP_S = 5.0
RAMP_S = 5.0
INSTANT, SLOW = "instant", "slow"
"""Models of the fake upstream: events all at once, or one every ``GAP_S``."""


# -- the fake upstream -----------------------------------------------------------------------------------------------


class Upstream(asyncio.Protocol):
    """One connection: just enough HTTP/1.1 for keep-alive clients that send a Content-Length."""

    def __init__(self) -> None:
        self._received = b""

    def connection_made(self, transport: Any) -> None:
        self._transport = transport

    def data_received(self, data: bytes) -> None:
        self._received += data
        head, found, rest = self._received.partition(b"\r\n\r\n")
        if not found:
            return
        at = head.lower().find(b"content-length:")
        length = int(head[at + 15 :].split(b"\r\n", 1)[0]) if at >= 0 else 0
        if len(rest) >= length:
            self._received = rest[length:]
            self._answer(head.split(b" ", 2), rest[:length])

    def _answer(self, request: list[bytes], body: bytes) -> None:
        if request[0] == b"POST":
            fields = json.loads(body)
            usage = {"prompt_tokens": 1, "completion_tokens": fields["max_tokens"], "total_tokens": 1}
            if fields.get("stream"):
                self._write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n")
                self._stream(fields["max_tokens"], GAP_S if fields["model"] == SLOW else 0.0, usage)
            else:
                message = {"role": "assistant", "content": "word " * fields["max_tokens"]}
                choices = [{"index": 0, "message": message, "finish_reason": "length"}]
                self._json(200, {"object": "chat.completion", "choices": choices, "usage": usage})
        elif request[1] == b"/v1/models":
            self._json(200, {"object": "list", "data": [{"id": name, "object": "model"} for name in (INSTANT, SLOW)]})
        else:
            self._json(200 if request[1] == b"/health" else 404, {})

    def _stream(self, left: int, gap_s: float, usage: dict[str, int]) -> None:
        while left:
            finish = "length" if left == 1 else None
            self._event({"choices": [{"index": 0, "delta": {"content": "word "}, "finish_reason": finish}]})
            left -= 1
            if gap_s and left:
                asyncio.get_running_loop().call_later(gap_s, self._stream, left, gap_s, usage)
                return
        self._event({"choices": [], "usage": usage})
        self._chunk(b"data: [DONE]\n\n")
        self._write(b"0\r\n\r\n")

    def _event(self, fields: dict[str, Any]) -> None:
        event = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 0, "model": INSTANT, **fields}
        self._chunk(b"data: " + json.dumps(event).encode() + b"\n\n")

    def _chunk(self, data: bytes) -> None:
        self._write(f"{len(data):x}\r\n".encode() + data + b"\r\n")

    def _json(self, status: int, fields: dict[str, Any]) -> None:
        body = json.dumps(fields).encode()
        head = f"HTTP/1.1 {status} X\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n\r\n"
        self._write(head.encode() + body)

    def _write(self, data: bytes) -> None:
        if not self._transport.is_closing():
            self._transport.write(data)


async def be_upstream(port: int) -> None:
    server = await asyncio.get_running_loop().create_server(Upstream, "127.0.0.1", port, backlog=4096)
    await server.serve_forever()


# -- measuring -------------------------------------------------------------------------------------------------------


def questions() -> list[str]:
    rows = (common.ROOT / "examples" / "gsm8k_sample.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(row)["question"] for row in rows]


def ask(url: str, model: str, times_s: Sequence[float], *, tokens: int, stream: bool) -> list[Answer]:
    prompts = questions()
    asks = [Ask(prompts[i % len(prompts)], tokens) for i in range(len(times_s))]
    return uvloop.run(load.run_open(url, model, asks, times_s, stream=stream))


def overhead(urls: dict[str, str], *, rounds: int, seconds: float) -> dict[str, Any]:
    """By arm, milliseconds. ``added_ms`` is against the arm ``direct``."""
    found: dict[str, Any] = {}
    for label, stream, tokens in (("one JSON answer", False, 16), ("streamed", True, 16)):
        latency_ms: dict[str, list[float]] = {arm: [] for arm in urls}
        ttft_ms: dict[str, list[float]] = {arm: [] for arm in urls}
        errors = 0
        for round_ in range(rounds):
            times = load.arrival_times("poisson", round(50 * seconds), rate=50.0, seed=round_)
            for arm, url in urls.items():
                answers = ask(url, INSTANT, times, tokens=tokens, stream=stream)
                errors += sum(a.error is not None for a in answers)
                settled = [a for a in answers if a.asked_s >= 1.0]
                latency_ms[arm] += [1000 * a.latency_s for a in settled]
                ttft_ms[arm] += [1000 * a.ttft_s for a in settled]
        by_arm = {arm: {"latency_ms": spread(latency_ms[arm]), "ttft_ms": spread(ttft_ms[arm])} for arm in urls}
        for arm in MODES:
            of = {"latency_ms": latency_ms, "ttft_ms": ttft_ms}
            by_arm[arm]["added_ms"] = {
                figure: {p: round(by_arm[arm][figure][p] - by_arm["direct"][figure][p], 3) for p in ("p50", "p99")}
                for figure in of
            }
        found[label] = {**by_arm, "errors": errors}
        print(f"overhead, {label}: " + str({arm: by_arm[arm]["added_ms"] for arm in MODES}), flush=True)
    return found


def spread(values: Sequence[float]) -> dict[str, float]:
    return {p: round(float(np.percentile(values, q)), 3) for p, q in load.PERCENTILES.items()}


def rate(url: str, *, seconds: float) -> dict[str, Any]:
    answers = ask(url, INSTANT, np.arange(0, seconds, 1 / 500).tolist(), tokens=1, stream=False)
    span_s = max(a.asked_s + a.latency_s for a in answers)
    return {
        "requests": len(answers),
        "errors": sum(a.error is not None for a in answers),
        "first_error": next((a.error for a in answers if a.error), None),
        "requests_per_s": round(len(answers) / span_s, 1),
        "latency_ms": spread([1000 * a.latency_s for a in answers]),
    }


def hold_streams(gateway: Server, *, count: int, events: int) -> dict[str, Any]:
    """``count`` streams that begin within ``RAMP_S`` and last ``(events - 1) * GAP_S`` each."""
    process = psutil.Process(gateway.process.pid)
    before, highest = process.memory_info().rss, 0

    async def watch() -> None:
        nonlocal highest
        while True:
            highest = max(highest, process.memory_info().rss)
            await asyncio.sleep(0.5)

    async def both() -> list[Answer]:
        watching = asyncio.create_task(watch())
        prompts = questions()
        asks = [Ask(prompts[i % len(prompts)], events) for i in range(count)]
        times = np.linspace(0, RAMP_S, count).tolist()
        answers = await load.run_open(gateway.url, SLOW, asks, times)
        watching.cancel()
        return answers

    answers = uvloop.run(both())
    good = [a for a in answers if a.error is None]
    edges = sorted([(a.asked_s, 1) for a in good] + [(a.asked_s + a.latency_s, -1) for a in good])
    return {
        "streams": count,
        "errors": len(answers) - len(good),
        "first_error": next((a.error for a in answers if a.error), None),
        "most_at_once": int(np.cumsum([step for _, step in edges]).max(initial=0)),
        "ttft_ms": spread([1000 * a.ttft_s for a in answers]),
        "late_ms": spread([1000 * (a.latency_s - (events - 1) * GAP_S) for a in answers]),
        "memory_mib": {"before": round(before / 2**20), "highest": round(highest / 2**20)},
        "memory_kib_per_stream": round((highest - before) / 2**10 / count, 1),
    }


# -- the experiment --------------------------------------------------------------------------------------------------


def main() -> None:
    p = common.parser(__doc__ or "")
    p.add_argument("--upstream", type=int, metavar="PORT", help="(internal) be the fake upstream")
    args = p.parse_args()
    most_files = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (most_files, most_files))  # for the child processes, too
    if args.upstream:
        uvloop.run(be_upstream(args.upstream))
        return
    cores = sorted(os.sched_getaffinity(0))
    if len(cores) < 2:
        raise SystemExit("bench/gateway.py needs two cores: one for the gateway, one for the load")
    os.sched_setaffinity(0, {cores[1]})
    with ExitStack() as stack:
        upstream = stack.enter_context(
            Server("upstream", [sys.executable, __file__, "--upstream", "PORT"], cores={cores[1]})
        )
        gateways = {}
        for mode in MODES:
            command = [sys.executable, "-m", "longtail", "gateway", "--upstream", upstream.url, "--port", "PORT"]
            command += ["--mode", mode, *(["--window", "2500"] if mode == "hold" else [])]
            server = Server(f"gateway-{mode}", command, {"OMP_NUM_THREADS": "1"}, cores={cores[0]})
            gateways[mode] = stack.enter_context(server)
        urls = {"direct": upstream.url, **{mode: server.url for mode, server in gateways.items()}}
        found: dict[str, Any] = {
            "overhead": overhead(urls, rounds=1 if args.quick else 3, seconds=6 if args.quick else 12)
        }
        for name, measure in (
            ("rate", lambda server: rate(server.url, seconds=5 if args.quick else 20)),
            ("streams", lambda s: hold_streams(s, count=500 if args.quick else 2000, events=3 if args.quick else 6)),
        ):
            found[name] = {mode: measure(server) for mode, server in gateways.items()}
            print(f"{name}: {found[name]}", flush=True)
    os.sched_setaffinity(0, cores)
    common.finish("gateway", quick=args.quick, seeds=[0], arms=found, targets=targets_of(found))


def targets_of(found: dict[str, Any]) -> list[dict[str, Any]]:
    targets = []
    for label, by_arm in found["overhead"].items():
        for mode in MODES:
            for p, most in (("p50", 2.0), ("p99", 8.0)):
                value = by_arm[mode]["added_ms"]["latency_ms"][p]
                targets.append(common.target(f"{mode}, {label}: added {p}, ms", value, f"<= {most:.0f}", value <= most))
    for mode in MODES:
        errors = found["rate"][mode]["errors"]
        targets.append(common.target(f"{mode}: errors at 500 requests/s", errors, "0", errors == 0))
        streams = found["streams"][mode]
        held = streams["most_at_once"] if streams["errors"] == 0 else 0
        met = held == streams["streams"]
        targets.append(common.target(f"{mode}: streams held and completed", held, f"{streams['streams']}", met))
    return targets


if __name__ == "__main__":
    main()

"""`longtail serve`, `longtail gateway` and `longtail keys`."""

from __future__ import annotations

import logging
import os
from collections.abc import Awaitable, Callable
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from longtail.cli_common import BAD_INPUT, INTERRUPTED, fail, print_error, stderr, stdout
from longtail.planner.deadline import HEAD_START_S

if TYPE_CHECKING:
    from longtail.serve.build import Options
    from longtail.serve.http import Listen

LISTENING, ORDERING, LIMITS, SECURITY, LEARNING = "Listening", "Ordering", "Limits", "Security", "Learning"


class Order(StrEnum):
    RANKED = "ranked"
    FCFS = "fcfs"


class Mode(StrEnum):
    HOLD = "hold"
    TAG = "tag"


Host = Annotated[str, typer.Option("--host", help="Address to listen on.", rich_help_panel=LISTENING)]
Port = Annotated[int, typer.Option("--port", min=0, max=65535, help="0: any free one.", rich_help_panel=LISTENING)]
Certificate = Annotated[
    Path | None, typer.Option("--tls-cert", metavar="FILE", help="Serve by TLS.", rich_help_panel=SECURITY)
]
PrivateKey = Annotated[Path | None, typer.Option("--tls-key", metavar="FILE", rich_help_panel=SECURITY)]
KeysFile = Annotated[
    Path | None,
    typer.Option(
        "--keys", metavar="FILE", help="API keys and their limits (longtail keys new).", rich_help_panel=SECURITY
    ),
]
NoAuth = Annotated[
    bool, typer.Option("--no-auth", help="Listen beyond this machine without keys.", rich_help_panel=SECURITY)
]
OpenMetrics = Annotated[bool, typer.Option("--open-metrics", help="/metrics needs no key.", rich_help_panel=SECURITY)]
TrustPriority = Annotated[
    bool,
    typer.Option(
        "--trust-priority",
        help="Without --keys: a client's own X-Vllm-Priority or 'priority' counts.",
        rich_help_panel=SECURITY,
    ),
]
OrderOption = Annotated[
    Order, typer.Option("--order", help="ranked: shorter answers first. fcfs: as they come.", rich_help_panel=ORDERING)
]
RankerOption = Annotated[
    Path | None,
    typer.Option(
        "--ranker",
        metavar="DIR",
        help="Made by `longtail rank train`; default: the built-in one.",
        rich_help_panel=ORDERING,
    ),
]
HeadStart = Annotated[
    float,
    typer.Option(
        "--max-head-start",
        min=0,
        metavar="SECONDS",
        help="No request is overtaken by one that comes this much later; 0 is first come first served.",
        rich_help_panel=ORDERING,
    ),
]
MaxWait = Annotated[
    float,
    typer.Option(
        "--max-wait", min=0, metavar="SECONDS", help="Whoever waited longer goes first.", rich_help_panel=ORDERING
    ),
]
ScoreWithin = Annotated[
    float,
    typer.Option(
        "--score-within", min=0.1, metavar="MS", help="Go without a rank that takes longer.", rich_help_panel=ORDERING
    ),
]
MaxQueue = Annotated[
    int, typer.Option("--max-queue", min=1, help="Requests that may wait; more get 429.", rich_help_panel=LIMITS)
]
MaxBody = Annotated[float, typer.Option("--max-body", min=0.001, metavar="MIB", rich_help_panel=LIMITS)]
CommentEvery = Annotated[
    float | None,
    typer.Option(
        "--comment-every",
        min=0.1,
        metavar="SECONDS",
        help="Keep waiting streams alive with comment lines.",
        rich_help_panel=LIMITS,
    ),
]
DrainWithin = Annotated[
    float,
    typer.Option(
        "--drain-within",
        min=0,
        metavar="SECONDS",
        help="On SIGTERM, how long to finish what is under way.",
        rich_help_panel=LIMITS,
    ),
]
Record = Annotated[
    Path | None,
    typer.Option(
        "--record",
        metavar="FILE",
        help="Append the lengths of what is served, for `longtail rank train`.",
        rich_help_panel=LEARNING,
    ),
]
RecordPrompts = Annotated[
    bool,
    typer.Option("--record-prompts", help="Record the prompts too, not only their features.", rich_help_panel=LEARNING),
]
Verbose = Annotated[bool, typer.Option("--verbose", "-v", help="Log a line for every request (never its text).")]


def serve(
    model: Annotated[str, typer.Argument(help="A built-in name, a folder, or a Hugging Face id.")],
    name: Annotated[str | None, typer.Option("--name", help="The model's name in the API. Default: MODEL.")] = None,
    slots: Annotated[
        int, typer.Option("--slots", min=1, help="Answers generated at once.", rich_help_panel=LIMITS)
    ] = 16,
    kv_memory: Annotated[
        float, typer.Option("--kv-memory", min=0.01, metavar="GIB", help="Memory for KV.", rich_help_panel=LIMITS)
    ] = 1.0,
    max_context: Annotated[
        int | None, typer.Option("--max-context", min=2, help="Tokens of prompt and answer.", rich_help_panel=LIMITS)
    ] = None,
    host: Host = "127.0.0.1",
    port: Port = 8000,
    order: OrderOption = Order.RANKED,
    ranker: RankerOption = None,
    max_head_start: HeadStart = HEAD_START_S,
    max_wait: MaxWait = 300.0,
    score_within: ScoreWithin = 50.0,
    max_queue: MaxQueue = 2000,
    max_body: MaxBody = 32.0,
    comment_every: CommentEvery = None,
    drain_within: DrainWithin = 300.0,
    keys: KeysFile = None,
    no_auth: NoAuth = False,
    open_metrics: OpenMetrics = False,
    trust_priority: TrustPriority = False,
    tls_cert: Certificate = None,
    tls_key: PrivateKey = None,
    record: Record = None,
    record_prompts: RecordPrompts = False,
    verbose: Verbose = False,
) -> None:
    """Serve a model behind OpenAI's API, shorter answers first.

    \b
    longtail serve smollm2-135m
    longtail serve Qwen/Qwen3-0.6B --slots 32 --kv-memory 8
    """
    options = _options(
        order, False, ranker, max_head_start, max_wait, score_within, max_queue, max_body, comment_every, drain_within,
        keys, open_metrics, trust_priority, record, record_prompts,
    )  # fmt: skip
    listen = _listen(host, port, tls_cert, tls_key)

    async def run() -> None:
        from longtail.serve.build import front_door
        from longtail.serve.http import serve as serve_http
        from longtail.serve.local import LocalBackend

        listen.check(keys=keys is not None, open_to_all=no_auth)
        backend = LocalBackend.load(
            model, name=name or model, slots=slots, kv_bytes=round(kv_memory * 2**30), max_context=max_context
        )
        door = front_door(backend, options, title=f"longtail serve {model}")
        await serve_http(door, listen, ready=lambda url, _: _say(_served(name or model, url, options, "hold")))

    _run(run, verbose)


def gateway(
    upstream: Annotated[
        list[str], typer.Option("--upstream", metavar="URL", help="An OpenAI-compatible server; may be repeated.")
    ],
    mode: Annotated[
        Mode,
        typer.Option(
            "--mode",
            help="hold: keep requests here and release them in order (any server). tag: pass them on at once with a "
            "priority (vLLM with --scheduling-policy priority).",
            rich_help_panel=ORDERING,
        ),
    ] = Mode.HOLD,
    window: Annotated[
        str,
        typer.Option(
            "--window",
            metavar="N|auto",
            help="Hold mode: answers in flight at each upstream. auto: found out from its /metrics.",
            rich_help_panel=ORDERING,
        ),
    ] = "auto",
    host: Host = "127.0.0.1",
    port: Port = 8100,
    order: OrderOption = Order.RANKED,
    ranker: RankerOption = None,
    max_head_start: HeadStart = HEAD_START_S,
    max_wait: MaxWait = 300.0,
    score_within: ScoreWithin = 50.0,
    max_queue: MaxQueue = 2000,
    max_body: MaxBody = 32.0,
    connect_within: Annotated[
        float, typer.Option("--connect-within", min=0.1, metavar="SECONDS", rich_help_panel=LIMITS)
    ] = 5.0,
    first_byte_within: Annotated[
        float,
        typer.Option(
            "--first-byte-within", min=0.1, metavar="SECONDS", help="Until an answer begins.", rich_help_panel=LIMITS
        ),
    ] = 600.0,
    idle_within: Annotated[
        float,
        typer.Option("--idle-within", min=0.1, metavar="SECONDS", help="Between two bytes.", rich_help_panel=LIMITS),
    ] = 120.0,
    comment_every: CommentEvery = None,
    drain_within: DrainWithin = 300.0,
    keys: KeysFile = None,
    no_auth: NoAuth = False,
    open_metrics: OpenMetrics = False,
    trust_priority: TrustPriority = False,
    upstream_key_env: Annotated[
        str | None,
        typer.Option(
            "--upstream-key-env",
            metavar="NAME",
            help="Environment variable with the upstreams' key. Else, without --keys, the client's own passes.",
            rich_help_panel=SECURITY,
        ),
    ] = None,
    upstream_ca: Annotated[
        Path | None,
        typer.Option("--upstream-ca", metavar="FILE", help="Certificates to trust.", rich_help_panel=SECURITY),
    ] = None,
    tls_cert: Certificate = None,
    tls_key: PrivateKey = None,
    record: Record = None,
    record_prompts: RecordPrompts = False,
    verbose: Verbose = False,
) -> None:
    """Put a proxy in front of OpenAI-compatible servers that lets shorter answers go first.

    \b
    longtail gateway --upstream http://gpu1:8000 --upstream http://gpu2:8000
    longtail gateway --upstream http://gpu1:8000 --mode tag
    """
    options = _options(
        order, mode is Mode.TAG, ranker, max_head_start, max_wait, score_within, max_queue, max_body, comment_every,
        drain_within, keys, open_metrics, trust_priority, record, record_prompts,
    )  # fmt: skip
    listen = _listen(host, port, tls_cert, tls_key)

    async def run() -> None:
        from longtail.serve.gateway import gateway_door
        from longtail.serve.http import serve as serve_http
        from longtail.serve.upstreams import Timeouts

        listen.check(keys=keys is not None, open_to_all=no_auth)
        door = gateway_door(
            upstream,
            options,
            window=_window(window),
            timeouts=Timeouts(connect_s=connect_within, first_byte_s=first_byte_within, idle_s=idle_within),
            key=_secret(upstream_key_env),
            ca_file=upstream_ca,
        )
        await serve_http(door, listen, ready=lambda url, _: _say(_served("gateway", url, options, mode.value)))

    _run(run, verbose)


keys_app = typer.Typer(no_args_is_help=True, help="API keys for `longtail serve` and `longtail gateway`.")


@keys_app.command("new")
def new_key(
    name: Annotated[str, typer.Argument(help="Who it is for.")],
    weight: Annotated[float, typer.Option("--weight", min=0.001, max=1000, help="Share beside other keys.")] = 1.0,
) -> None:
    """Make an API key: the key itself is printed once, its entry for the keys file on standard output.

    \b
    echo "keys:" > keys.yaml
    longtail keys new team-a >> keys.yaml
    """
    from longtail.core.errors import LongtailError
    from longtail.serve.keys import entry
    from longtail.serve.keys import new_key as make

    try:
        key, digest = make()
        typer.echo(entry(name, digest, weight), nl=False)
    except LongtailError as error:
        fail(error)
    stderr.print(f"The key of {name}, shown only now: {key}")


def _options(
    order: Order, tag: bool, ranker: Path | None, max_head_start: float, max_wait: float, score_within_ms: float,
    max_queue: int, max_body_mib: float, comment_every: float | None, drain_within: float, keys: Path | None,
    open_metrics: bool, trust_priority: bool, record: Path | None, record_prompts: bool,
) -> Options:  # fmt: skip
    from longtail.serve.build import Options
    from longtail.serve.front import DoorSettings

    door = DoorSettings(
        ranked=order is Order.RANKED,
        tag=tag,
        head_start_s=max_head_start,
        trust_priority=trust_priority,
        body_limit=round(max_body_mib * 2**20),
        comment_s=comment_every,
        drain_s=drain_within,
        open_metrics=open_metrics,
    )
    return Options(
        door=door,
        ranker=ranker,
        score_within_s=score_within_ms / 1000,
        max_wait_s=max_wait,
        max_queue=max_queue,
        keys=keys,
        record=record,
        record_prompts=record_prompts,
    )


def _listen(host: str, port: int, certificate: Path | None, private_key: Path | None) -> Listen:
    from longtail.serve.http import Listen

    return Listen(host=host, port=port, certificate=certificate, private_key=private_key)


def _window(text: str) -> int | None:
    """None for auto."""
    if text == "auto":
        return None
    if not text.isdecimal() or not 1 <= int(text) <= 100_000:
        print_error(f"--window {text}: must be auto, or a whole number of at least 1 (the server's batch size).")
        raise typer.Exit(BAD_INPUT)
    return int(text)


def _secret(variable: str | None) -> str | None:
    if variable is None:
        return None
    value = os.environ.get(variable, "").strip()
    if not value:
        print_error(f"--upstream-key-env {variable}: this environment variable is not set.")
        raise typer.Exit(BAD_INPUT)
    return value


def _served(what: str, url: str, options: Options, mode: str) -> str:
    how = f"ranked, head start at most {options.door.head_start_s:g} s" if options.door.ranked else "fcfs"
    return f"{what} at {url}/v1   mode {mode}, order {how}"


def _say(text: str) -> None:
    stdout.print(text)


def _run(main: Callable[[], Awaitable[None]], verbose: bool) -> None:
    import asyncio

    import uvloop

    from longtail.core.errors import LongtailError

    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(levelname)s %(message)s")
    logging.getLogger("longtail").setLevel(logging.INFO if verbose else logging.WARNING)

    async def body() -> None:
        await main()

    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(body())
    except LongtailError as error:
        fail(error)
    except KeyboardInterrupt:
        raise typer.Exit(INTERRUPTED) from None

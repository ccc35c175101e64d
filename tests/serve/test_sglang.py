"""The SGLang plug-in, against a stand-in for the parts of SGLang that it touches.

SGLang needs a GPU, so nothing here runs it. The stand-in follows what SGLang publishes: the hook registry of
``sglang.srt.plugins`` (hooks by dotted name, applied once after all plug-ins have registered; AROUND gets the original
first, AFTER gets the result first), a tokenizer manager whose ``generate_request(obj, request)`` is an asynchronous
generator that broadcasts each request to the schedulers of a tensor-parallel group, and a schedule policy whose
``calc_priority(waiting_queue, running_batch)`` orders a list in place.
"""

from __future__ import annotations

import asyncio
import copy
import enum
import functools
import itertools
import pkgutil
import sys
import time
from dataclasses import dataclass
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from longtail.core.errors import RankerError
from longtail.planner.deadline import HEAD_START_S, as_priority
from longtail.serve import plugin
from longtail.serve import sglang as plugged
from longtail.serve.sglang import UNRANKED_BEFORE_SAYING, SchedulerHook, obstacle, register

SHORT, LONG = "hi", "x" * 90
REAL_LOAD = plugin.Ranker.load


class ByLength:
    """A prompt of n characters is at quantile n / 100."""

    def quantile(self, prompts: list[str]) -> np.ndarray:
        return np.array([min(1.0, len(prompt) / 100) for prompt in prompts])


class HookType(enum.Enum):
    AFTER = "after"
    AROUND = "around"


class HookRegistry:
    hooks: ClassVar[list[tuple[str, Any, HookType]]] = []

    @classmethod
    def register(cls, target: str, hook: Any, hook_type: HookType = HookType.AFTER) -> None:
        cls.hooks.append((target, hook, hook_type))

    @classmethod
    def apply_hooks(cls) -> None:
        for target, hook, hook_type in cls.hooks:
            owner_name, _, name = target.rpartition(".")
            owner = pkgutil.resolve_name(owner_name)
            setattr(owner, name, cls._wrapped(getattr(owner, name), hook, hook_type))

    @staticmethod
    def _wrapped(original: Any, hook: Any, hook_type: HookType) -> Any:
        @functools.wraps(original)
        def wrapper(*args: Any, **kwargs: Any) -> Any:
            if hook_type is HookType.AROUND:
                return hook(original, *args, **kwargs)
            result = original(*args, **kwargs)
            changed = hook(result, *args, **kwargs)
            return result if changed is None else changed

        return wrapper


@dataclass
class GenerateReqInput:
    text: Any = None
    input_ids: Any = None
    priority: int | None = None
    rid: str = ""


@dataclass(eq=False)
class Req:
    rid: str
    priority: int | None


class Fcfs(enum.Enum):
    FCFS = "fcfs"


class Lpm(enum.Enum):
    LPM = "lpm"


def stand_in() -> dict[str, ModuleType]:
    """Fresh modules of the names that SGLang uses."""

    class TokenizerManager:
        def __init__(self, server_args: Any, port_args: Any = None) -> None:
            self.server_args = server_args
            self.schedulers: list[list[Req]] = [[] for _ in range(server_args.tp_size)]
            self.closed: list[str] = []

        async def generate_request(self, obj: GenerateReqInput, request: Any = None) -> Any:
            for waiting_queue in self.schedulers:
                waiting_queue.append(Req(obj.rid, copy.copy(obj.priority)))
            try:
                yield {"text": "a"}
                yield {"text": "ab"}
            finally:
                self.closed.append(obj.rid)

    class SchedulePolicy:
        def __init__(self, server_args: Any) -> None:
            self.policy = Fcfs.FCFS if server_args.schedule_policy == "fcfs" else Lpm.LPM
            self.enable_priority_scheduling = server_args.enable_priority_scheduling

        def calc_priority(self, waiting_queue: list[Req], running_batch: Any = None) -> None:
            if self.enable_priority_scheduling:
                waiting_queue.sort(key=lambda request: -(request.priority or 0))

    modules = {
        "sglang": {},
        "sglang.srt": {},
        "sglang.srt.plugins": {},
        "sglang.srt.plugins.hook_registry": {"HookRegistry": HookRegistry, "HookType": HookType},
        "sglang.srt.managers": {},
        "sglang.srt.managers.tokenizer_manager": {"TokenizerManager": TokenizerManager},
        "sglang.srt.managers.schedule_policy": {"SchedulePolicy": SchedulePolicy},
    }
    found = {name: ModuleType(name) for name in modules}
    for name, values in modules.items():
        vars(found[name]).update(values)
        parent, _, last = name.rpartition(".")
        if parent:
            setattr(found[parent], last, found[name])
    return found


def server_args(**changed: Any) -> SimpleNamespace:
    """SGLang's defaults."""
    defaults = {
        "tp_size": 2,
        "schedule_policy": "fcfs",
        "enable_priority_scheduling": False,
        "abort_on_priority_when_disabled": False,
    }
    return SimpleNamespace(**{**defaults, **changed})


@pytest.fixture
def sglang(monkeypatch):
    """Loads the plug-in into a fresh stand-in as SGLang does, and makes (manager, policy) for server arguments."""
    monkeypatch.setenv("LONGTAIL_ORDER", "ranked")
    for name in ("LONGTAIL_MAX_HEAD_START", "LONGTAIL_RANKER", "LONGTAIL_TRUST_PRIORITY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(plugin.Ranker, "load", lambda path=None: ByLength())
    monkeypatch.setattr(plugin, "SCORE_WITHIN_S", 20.0)
    for name, module in stand_in().items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(HookRegistry, "hooks", [])

    def load(**changed: Any) -> tuple[Any, Any]:
        register()
        HookRegistry.apply_hooks()
        args = server_args(**changed)
        manager = sys.modules["sglang.srt.managers.tokenizer_manager"].TokenizerManager(args, None)
        return manager, sys.modules["sglang.srt.managers.schedule_policy"].SchedulePolicy(args)

    return load


class HttpRequest:
    """What FastAPI hands on: a request whose body has been read."""

    def __init__(self, fields: Any) -> None:
        self.fields = fields

    async def json(self) -> Any:
        return self.fields


def chat(prompt: str, **fields: Any) -> HttpRequest:
    messages = [{"role": "system", "content": "s" * 500}, {"role": "user", "content": prompt}]
    return HttpRequest({"messages": messages, **fields})


def ask(manager: Any, *requests: tuple[GenerateReqInput, Any]) -> list[list[Any]]:
    """What the server answers to these requests, one after the other."""

    async def all_of_them() -> list[list[Any]]:
        return [[answer async for answer in manager.generate_request(obj, request)] for obj, request in requests]

    return asyncio.run(asyncio.wait_for(all_of_them(), 30))


def order(manager: Any, policy: Any) -> list[list[str]]:
    """The waiting queue of each scheduler after it was ordered."""
    for waiting_queue in manager.schedulers:
        assert policy.calc_priority(waiting_queue, None) is None
    return [[request.rid for request in waiting_queue] for waiting_queue in manager.schedulers]


def test_a_short_request_overtakes_waiting_long_ones_on_all_ranks_alike(sglang):
    manager, policy = sglang()
    long = [(GenerateReqInput(input_ids=[1, 2], rid=f"long-{i}"), chat(LONG)) for i in range(3)]
    answers = ask(manager, *long, (GenerateReqInput(input_ids=[3], rid="short"), chat(SHORT)))
    assert order(manager, policy) == [["short", "long-0", "long-1", "long-2"]] * 2
    assert answers == [[{"text": "a"}, {"text": "ab"}]] * 4


def test_the_priority_is_the_virtual_deadline_of_the_prompt_as_it_was_before_the_chat_template(sglang):
    manager, _ = sglang()
    begun_s = time.time()
    ask(manager, (GenerateReqInput(input_ids=[1] * 900, rid="r"), chat(LONG)))
    (request,) = manager.schedulers[0]
    assert (
        as_priority(begun_s + 0.9 * HEAD_START_S) - 1
        <= request.priority
        <= as_priority(time.time() + 0.9 * HEAD_START_S) + 1
    )


@pytest.mark.parametrize(
    ("obj", "request_", "quantile"),
    [
        (GenerateReqInput(text=LONG), None, 0.9),
        (GenerateReqInput(text=[SHORT, LONG]), None, 0.9),
        (GenerateReqInput(text=LONG), HttpRequest({"text": LONG}), 0.9),
        (GenerateReqInput(text=LONG), HttpRequest({"prompt": LONG}), 0.9),
        (GenerateReqInput(input_ids=[1, 2]), HttpRequest({"prompt": [1, 2]}), 0.5),
        (GenerateReqInput(input_ids=[1, 2]), None, 0.5),
        (GenerateReqInput(input_ids=[1, 2]), HttpRequest([1]), 0.5),
        (GenerateReqInput(input_ids=[1, 2]), HttpRequest({"messages": [7]}), 0.5),
    ],
)
def test_text_is_found_wherever_a_request_has_it_and_else_its_length_counts_as_average(sglang, obj, request_, quantile):
    manager, _ = sglang()
    begun_s = time.time()
    ask(manager, (copy.copy(obj), request_))
    head_start_s = HEAD_START_S * quantile
    (request,) = manager.schedulers[0]
    assert as_priority(begun_s + head_start_s) - 1 <= request.priority <= as_priority(time.time() + head_start_s) + 1


def test_a_request_whose_body_cannot_be_read_goes_through(sglang):
    class Broken:
        async def json(self):
            raise RuntimeError("stream consumed")

    manager, _ = sglang()
    assert ask(manager, (GenerateReqInput(text=LONG), Broken())) == [[{"text": "a"}, {"text": "ab"}]]
    assert manager.schedulers[0][0].priority is not None


def test_a_kind_of_request_without_priority_goes_through(sglang):
    class Slotted:
        __slots__ = ("rid", "text")

        def __init__(self):
            self.rid, self.text = "r", SHORT

        @property
        def priority(self):
            return None

    manager, _ = sglang()
    assert ask(manager, (Slotted(), None)) == [[{"text": "a"}, {"text": "ab"}]]


def test_a_ranker_that_fails_costs_the_order_only(sglang, monkeypatch):
    class Raises:
        def quantile(self, prompts):
            raise RuntimeError("no")

    monkeypatch.setattr(plugin.Ranker, "load", lambda path=None: Raises())
    manager, policy = sglang()
    ask(manager, *((GenerateReqInput(text=text, rid=text), None) for text in (LONG, SHORT)))
    assert order(manager, policy)[0] == [LONG, SHORT]


@pytest.mark.parametrize("trusted", [False, True])
def test_the_priority_of_a_client_counts_only_if_clients_are_trusted(sglang, monkeypatch, trusted):
    monkeypatch.setenv("LONGTAIL_TRUST_PRIORITY", str(int(trusted)))
    manager, policy = sglang()
    ask(manager, (GenerateReqInput(text=SHORT, rid="first"), None))
    ask(manager, (GenerateReqInput(text=LONG, rid="pushes", priority=-5), None))
    assert order(manager, policy)[0] == (["pushes", "first"] if trusted else ["first", "pushes"])


def test_a_client_that_leaves_closes_sglangs_own_generator(sglang):
    manager, _ = sglang()

    async def leave():
        answers = manager.generate_request(GenerateReqInput(text=SHORT, rid="gone"), None)
        assert await answers.__anext__() == {"text": "a"}
        await answers.aclose()
        return list(manager.closed)

    assert asyncio.run(asyncio.wait_for(leave(), 30)) == ["gone"]


def test_a_retracted_request_keeps_the_place_of_its_arrival(sglang, monkeypatch):
    clock = itertools.count(1_800_000_000)
    monkeypatch.setattr(plugged, "time", SimpleNamespace(time=lambda: next(clock)))
    manager, policy = sglang(tp_size=1)
    ask(manager, *((GenerateReqInput(text=SHORT, rid=rid), None) for rid in ("old", "new", "newest")))
    queue = manager.schedulers[0]
    old = queue.pop(0)
    queue.append(old)  # retracted: SGLang puts it at the end
    assert order(manager, policy)[0] == ["old", "new", "newest"]


@pytest.mark.parametrize("asked", ["", "fcfs"])
def test_the_plug_in_does_nothing_unless_it_is_asked_to(sglang, monkeypatch, asked):
    monkeypatch.setenv("LONGTAIL_ORDER", asked)
    manager, policy = sglang()
    assert HookRegistry.hooks == []
    ask(manager, *((GenerateReqInput(text=text, rid=text), None) for text in (LONG, SHORT)))
    assert [request.priority for request in manager.schedulers[0]] == [None, None]
    assert order(manager, policy)[0] == [LONG, SHORT]


def test_a_setting_that_cannot_be_used_ends_the_process_with_a_sentence(sglang, monkeypatch):
    monkeypatch.setenv("LONGTAIL_MAX_HEAD_START", "soon")
    with pytest.raises(SystemExit, match="LONGTAIL_MAX_HEAD_START = 'soon': it must be a number of seconds"):
        register()


def test_a_ranker_that_is_not_there_stops_the_server(sglang, monkeypatch, tmp_path):
    monkeypatch.setattr(plugin.Ranker, "load", REAL_LOAD)
    monkeypatch.setenv("LONGTAIL_RANKER", str(tmp_path / "nowhere"))
    with pytest.raises(RankerError, match="there is no such folder"):
        sglang()


OBSTACLES = [
    ({"enable_priority_scheduling": True}, "--enable-priority-scheduling"),
    ({"abort_on_priority_when_disabled": True}, "--abort-on-priority-when-disabled"),
    ({"schedule_policy": "lpm"}, "--schedule-policy lpm"),
]


@pytest.mark.parametrize(("changed", "says"), OBSTACLES)
def test_settings_under_which_ranks_would_do_harm_or_nothing_are_said_at_the_start_and_no_rank_is_set(
    sglang, capfd, changed, says
):
    manager, policy = sglang(**changed)
    assert says in capfd.readouterr().err
    ask(manager, *((GenerateReqInput(text=text, rid=text), None) for text in (LONG, SHORT)))
    assert [request.priority for request in manager.schedulers[0]] == [None, None]
    assert order(manager, policy)[0] == [LONG, SHORT]
    assert capfd.readouterr().err == ""


def test_nothing_is_said_under_sglangs_defaults(sglang, capfd):
    sglang()
    assert capfd.readouterr().err == ""
    assert obstacle(server_args()) is None


@pytest.mark.parametrize(("policy", "by_priority"), [(Lpm.LPM, False), (Fcfs.FCFS, True)])
def test_an_order_of_sglangs_own_is_left_alone(policy, by_priority):
    queue = [Req("b", 2), Req("a", 1)]
    SchedulerHook().sort(None, SimpleNamespace(policy=policy, enable_priority_scheduling=by_priority), queue)
    assert [request.rid for request in queue] == ["b", "a"]


def test_queues_without_any_rank_are_said_once(capfd):
    policy = SimpleNamespace(policy=Fcfs.FCFS, enable_priority_scheduling=False)
    hook = SchedulerHook()
    queue = [Req("a", None), Req("b", None)]
    for _ in range(UNRANKED_BEFORE_SAYING * 2):
        hook.sort(None, policy, queue)
    assert capfd.readouterr().err.count("no waiting request has a rank") == 1
    assert [request.rid for request in queue] == ["a", "b"]


def test_a_scheduler_of_another_shape_keeps_its_order_and_says_so_once(capfd):
    hook = SchedulerHook()
    queue = [Req("b", 2), Req("a", 1)]
    for _ in range(3):
        hook.sort(None, SimpleNamespace(), queue)
    assert [request.rid for request in queue] == ["b", "a"]
    assert capfd.readouterr().err.count("cannot be ordered") == 1


@given(st.lists(st.none() | st.integers(0, 20), max_size=30))
@settings(deadline=None)
def test_ordering_is_stable_loses_nobody_and_puts_unranked_requests_first(priorities):
    policy = SimpleNamespace(policy=Fcfs.FCFS, enable_priority_scheduling=False)
    queue = [Req(str(i), priority) for i, priority in enumerate(priorities)]
    before = list(queue)
    SchedulerHook().sort(None, policy, queue)
    assert queue == sorted(before, key=lambda r: (-1 if r.priority is None else r.priority, int(r.rid)))

"""Scoring never stops a request: whatever the ranker does, calls go on in time and are told why they have no score."""

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager

import numpy as np
import pytest

from longtail.lengths.ranker import Ranker
from longtail.serve.scoring import Scorer

LONG_S = 600.0
"""A deadline that is not meant to be met by accident."""


class ByLength:
    """0.01 for each character; what `hook` does comes first."""

    def __init__(self, hook: Callable[[Sequence[str]], None] = lambda prompts: None) -> None:
        self.hook = hook
        self.batches: list[list[str]] = []

    def quantile(self, prompts: Sequence[str]) -> np.ndarray:
        self.batches.append(list(prompts))
        self.hook(prompts)
        return np.array([len(p) / 100 for p in prompts], np.float32)


class Hangs:
    """A hook that holds every batch with `word` in it until :meth:`let_go`."""

    def __init__(self, word: str = "hang") -> None:
        self.word = word
        self.began, self._go = threading.Event(), threading.Event()

    def __call__(self, prompts: Sequence[str]) -> None:
        if any(self.word in p for p in prompts):
            self.began.set()
            assert self._go.wait(200)

    def let_go(self) -> None:
        self._go.set()


@asynccontextmanager
async def scoring(ranker, *, deadline_s: float = LONG_S, max_batch: int = 256) -> AsyncIterator[tuple[Scorer, list]]:
    reasons: list[str] = []
    scorer = Scorer(ranker, deadline_s=deadline_s, max_batch=max_batch, failed=reasons.append)
    scorer.start(wait_s=120.0)
    if isinstance(ranker, ByLength):
        ranker.batches.clear()
    try:
        yield scorer, reasons
    finally:
        scorer.close()


def run(scene: Callable[[], object]) -> None:
    async def main() -> None:
        await asyncio.wait_for(scene(), 200)

    asyncio.run(main())


async def event(flag: threading.Event) -> None:
    assert await asyncio.to_thread(flag.wait, 120)


def test_a_call_gets_the_largest_quantile_of_its_prompts():
    async def scene():
        async with scoring(ByLength()) as (scorer, reasons):
            assert await scorer.quantile(["x"]) == pytest.approx(0.01)
            assert await scorer.quantile(("x", "x" * 40, "")) == pytest.approx(0.4)
            assert await scorer.quantile([""]) == 0.0
        assert reasons == []

    run(scene)


def test_the_shipped_ranker_scores():
    async def scene():
        ranker = Ranker.load()
        async with scoring(ranker) as (scorer, reasons):
            prompts = ["hi", "Write a long essay about the history of France."]
            assert await scorer.quantile(prompts) == pytest.approx(float(ranker.quantile(prompts).max()))
            assert await scorer.quantile(["\ud800", "\0"]) is not None
        assert reasons == []

    run(scene)


def test_the_light_ranker_answers_without_leaving_the_loop_unless_there_is_much_to_read():
    async def scene():
        async with scoring(Ranker.load()) as (scorer, _):
            with pytest.raises(StopIteration) as answer:
                scorer.quantile(["Write a novel. " * 100_000]).send(None)
            assert 0.5 < answer.value.value <= 1
            assert await scorer.quantile(["Write a novel."] * 200) == pytest.approx(
                await scorer.quantile(["Write a novel."])
            )

    run(scene)


def test_an_error_on_the_loop_costs_the_score_only():
    async def scene():
        ranker = Ranker.load()
        async with scoring(ranker) as (scorer, reasons):
            ranker.knots = ranker.knots * np.nan
            assert await scorer.quantile(["hi"]) is None
            ranker.knots = None
            assert await scorer.quantile(["hi"]) is None
        assert reasons == ["error", "error"]

    run(scene)


def test_without_text_there_is_no_score():
    async def scene():
        async with scoring(ByLength()) as (scorer, reasons):
            assert await scorer.quantile([]) is None
            assert reasons == ["no_text"]

    run(scene)


def test_what_waits_is_scored_together_up_to_the_largest_batch():
    async def scene():
        hangs = Hangs()
        ranker = ByLength(hangs)
        async with scoring(ranker, max_batch=4) as (scorer, reasons):
            first = asyncio.create_task(scorer.quantile(["hang"]))
            await event(hangs.began)
            prompts = [["a"], ["bb", "ccc"], ["dddd", "eeeee"], ["f" * 6]]
            tasks = [asyncio.create_task(scorer.quantile(p)) for p in prompts]
            await asyncio.sleep(0)
            hangs.let_go()
            assert await asyncio.gather(first, *tasks) == pytest.approx([0.04, 0.01, 0.03, 0.05, 0.06])
            assert ranker.batches[1:] == [["a", "bb", "ccc"], ["dddd", "eeeee", "f" * 6]]
        assert reasons == []

    run(scene)


def test_of_a_call_with_very_many_prompts_the_first_are_read():
    async def scene():
        ranker = ByLength()
        async with scoring(ranker, max_batch=3) as (scorer, _):
            assert await scorer.quantile(["x", "xx", "xxx", "x" * 90]) == pytest.approx(0.03)
            assert [len(batch) for batch in ranker.batches] == [3]

    run(scene)


def test_a_prompt_that_the_ranker_cannot_take_spoils_no_neighbour():
    def raises(prompts):
        if "bad" in prompts:
            raise ValueError("bad prompt")

    async def scene():
        hangs = Hangs()
        async with scoring(ByLength(lambda p: (hangs(p), raises(p)))) as (scorer, reasons):
            first = asyncio.create_task(scorer.quantile(["hang"]))
            await event(hangs.began)
            tasks = [asyncio.create_task(scorer.quantile([p])) for p in ("ok", "bad", "fine")]
            await asyncio.sleep(0)
            hangs.let_go()
            await first
            assert await asyncio.gather(*tasks) == [pytest.approx(0.02), None, pytest.approx(0.04)]
            assert await scorer.quantile(["bad"]) is None
        assert reasons == ["error", "error"]

    run(scene)


@pytest.mark.parametrize(
    "answer",
    [
        lambda n: np.full(n, np.nan),
        lambda n: np.full(n, np.inf),
        lambda n: np.full(n, -0.1),
        lambda n: np.full(n, 1.5),
        lambda n: np.zeros(n + 1),
        lambda n: np.zeros((n, 1)),
        lambda n: 0.5,
        lambda n: ["high"] * n,
        lambda n: None,
    ],
)
def test_an_answer_that_is_no_quantile_is_an_error(answer):
    class Odd:
        def quantile(self, prompts):
            return answer(len(prompts))

    async def scene():
        async with scoring(Odd()) as (scorer, reasons):
            assert await scorer.quantile(["a", "b"]) is None
            assert await scorer.quantile(["a"]) is None
        assert reasons == ["error", "error"]

    run(scene)


def test_a_nan_for_one_call_leaves_its_neighbours_their_scores():
    class Nan(ByLength):
        def quantile(self, prompts):
            values = super().quantile(prompts)
            values[[p == "nan" for p in prompts]] = np.nan
            return values

    async def scene():
        hangs = Hangs()
        async with scoring(Nan(hangs)) as (scorer, reasons):
            first = asyncio.create_task(scorer.quantile(["hang"]))
            await event(hangs.began)
            tasks = [asyncio.create_task(scorer.quantile(p)) for p in (["a"], ["b", "nan"], ["c"])]
            await asyncio.sleep(0)
            hangs.let_go()
            await first
            assert await asyncio.gather(*tasks) == [pytest.approx(0.01), None, pytest.approx(0.01)]
        assert reasons == ["error"]

    run(scene)


@pytest.mark.parametrize("error", [SystemExit, KeyboardInterrupt, MemoryError])
def test_no_error_of_the_ranker_ends_the_thread(error):
    def raises(prompts):
        if "bad" in prompts:
            raise error

    async def scene():
        async with scoring(ByLength(raises)) as (scorer, reasons):
            assert await scorer.quantile(["bad"]) is None
            assert await scorer.quantile(["good"]) == pytest.approx(0.04)
        assert reasons == ["error"]

    run(scene)


def test_while_the_ranker_hangs_calls_wait_for_the_deadline_once_and_then_not_at_all():
    async def scene():
        hangs = Hangs()
        async with scoring(ByLength(hangs), deadline_s=0.05) as (scorer, reasons):
            started = time.monotonic()
            while "busy" not in reasons:  # the thread may be late, and take no call that nobody waits for any more
                waits = [scorer.quantile([p]) for p in ("hang", "hang behind it")]
                assert await asyncio.gather(*waits) == [None, None]
            assert time.monotonic() - started > 0.04
            assert "deadline" in reasons
            reasons.clear()
            for _ in range(200):
                with pytest.raises(StopIteration) as answer:
                    scorer.quantile(["x"]).send(None)
                assert answer.value.value is None
            assert reasons == ["busy"] * 200
            hangs.let_go()
            while await scorer.quantile(["back"]) is None:
                await asyncio.sleep(0.001)

    run(scene)


def test_calls_that_went_on_without_a_score_are_not_scored_later():
    async def scene():
        hangs = Hangs()
        ranker = ByLength(hangs)
        async with scoring(ranker, deadline_s=0.2) as (scorer, reasons):
            asks = []
            while not hangs.began.is_set():
                asks.append(asyncio.create_task(scorer.quantile(["hang"])))
                await asyncio.sleep(0.001)
            asks += [asyncio.create_task(scorer.quantile(["stale"])) for _ in range(3)]
            assert set(await asyncio.gather(*asks)) == {None}
            hangs.let_go()
            while await scorer.quantile(["fresh"]) is None:
                await asyncio.sleep(0.001)
            assert not any("stale" in batch for batch in ranker.batches)
            assert set(reasons) <= {"deadline", "busy"}

    run(scene)


def test_a_call_that_is_cancelled_while_it_waits_disturbs_nobody():
    async def scene():
        hangs = Hangs()
        async with scoring(ByLength(hangs)) as (scorer, reasons):
            first = asyncio.create_task(scorer.quantile(["hang"]))
            await event(hangs.began)
            gone, stays = [asyncio.create_task(scorer.quantile([p])) for p in ("gone", "stays")]
            await asyncio.sleep(0)
            gone.cancel()
            hangs.let_go()
            assert await stays == pytest.approx(0.05)
            assert await first == pytest.approx(0.04)
            assert gone.cancelled()
        assert reasons == []

    run(scene)


def test_outside_of_start_and_close_calls_go_on_at_once():
    async def scene():
        reasons: list[str] = []
        scorer = Scorer(ByLength(), deadline_s=LONG_S, failed=reasons.append)
        assert await scorer.quantile(["x"]) is None
        scorer.start()
        assert await scorer.quantile(["x"]) is not None
        scorer.close()
        assert await scorer.quantile(["x"]) is None
        scorer.close()
        assert reasons == ["busy", "busy"]

    run(scene)


def test_a_ranker_that_hangs_from_the_start_delays_neither_start_nor_close():
    async def scene():
        hangs = Hangs("")
        ranker = ByLength(hangs)
        reasons: list[str] = []
        scorer = Scorer(ranker, deadline_s=0.01, failed=reasons.append)
        scorer.start(wait_s=0.05)
        await event(hangs.began)
        assert [await scorer.quantile(["x"]) for _ in range(5)] == [None] * 5
        scorer.close()
        assert len(ranker.batches) == 1  # it still hangs
        assert set(reasons) <= {"deadline", "busy"}
        hangs.let_go()

    run(scene)


def test_a_loop_that_has_ended_does_not_end_the_thread():
    hangs = Hangs()
    scorer = Scorer(ByLength(hangs), deadline_s=LONG_S, failed=lambda reason: None)
    scorer.start()

    async def leaves():
        ask = asyncio.create_task(scorer.quantile(["hang"]))
        await event(hangs.began)
        assert not ask.done()

    async def asks():
        return await scorer.quantile(["later"])

    asyncio.run(leaves())
    hangs.let_go()
    assert asyncio.run(asks()) == pytest.approx(0.05)
    scorer.close()


def test_a_slow_ranker_gets_batches_that_it_can_finish_in_time():
    async def scene():
        ranker = ByLength(lambda prompts: time.sleep(0.02 * len(prompts)))
        async with scoring(ranker, deadline_s=0.5) as (scorer, _):
            scored = 0
            for _ in range(20):  # all are late if the thread or the loop stands still
                found = await asyncio.gather(*[scorer.quantile([f"prompt {i}"]) for i in range(60)])
                scored = max(scored, sum(value is not None for value in found))
                if scored >= 5:
                    break
            assert scored >= 5  # one batch of all would take 1.2 s
            assert max(len(batch) for batch in ranker.batches) <= 30

    run(scene)

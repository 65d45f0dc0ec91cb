"""The ways to call the engine: step by step, as a stream, by several at once; and its end."""

from __future__ import annotations

import asyncio
import contextlib

import pytest

from paxkv.engine import EngineError
from paxkv.sampling import SamplingParams
from paxkv.sched.events import RequestRejected
from paxkv.testing.letter_tokenizer import LetterTokenizer


def greedy(tokens: int = 20, **changes) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=tokens, **changes)


def test_steps_hand_out_what_changed(engine, prompt, dense):
    names = [engine.add_request(prompt(length), greedy()) for length in (5, 40)]
    seen = {name: [()] for name in names}
    while engine.has_work:
        for output in engine.step():
            assert output.token_ids[: len(seen[output.request_id][-1])] == seen[output.request_id][-1]
            assert len(output.token_ids) > len(seen[output.request_id][-1])
            seen[output.request_id].append(output.token_ids)
    assert [seen[name][-1] for name in names] == [dense(prompt(5), greedy()), dense(prompt(40), greedy())]
    assert all(len(outputs) > 4 for outputs in seen.values())
    assert engine.step() == []


def names_of(outputs) -> list:
    names = [output.request_id for output in outputs]
    assert len(set(names)) == len(names), f"one call of step hands out a name once, got {names}"
    return names


def test_a_step_names_a_request_once(engine, prompt, dense):
    """Also after a stream that kept what others got meanwhile."""
    others = [engine.add_request(prompt(9), greedy(tokens)) for tokens in (2, 30)]
    with contextlib.closing(engine.stream(prompt(5), greedy(60))) as stream:
        for output in stream:
            if len(output.token_ids) > 12:
                break
    done, before = {}, 0
    while engine.has_work:
        outputs = engine.step()
        names_of(outputs)
        for output in outputs:
            if output.request_id == others[1]:
                assert len(output.token_ids) >= max(before, 12)  # as it stands, not as it stood
                before = len(output.token_ids)
        done |= {output.request_id: output.token_ids for output in outputs if output.finished}
    assert done == {name: dense(prompt(9), greedy(tokens)) for name, tokens in zip(others, (2, 30), strict=True)}


def test_a_name_taken_again_waits_its_turn(engine, prompt, dense):
    """Both have ended before the next step: each is handed out, one a call."""
    for tokens in (30, 20, 4):
        engine.add_request(prompt(5), greedy(tokens), request_id="a")
        if tokens > 4:
            engine.abort("a")
    ends = []
    while engine.has_work:
        outputs = engine.step()
        assert len(names_of(outputs)) < 2
        ends += [output for output in outputs if output.finished]
    assert [output.outputs[0].finish_reason for output in ends] == ["abort", "abort", "length"]
    assert ends[-1].token_ids == dense(prompt(5), greedy(4))


def test_times(make, prompt):
    clock = iter(range(10_000))
    engine = make(clock=lambda: float(next(clock)))
    engine.add_request(prompt(5), greedy(6), arrival_s=-3.0)
    outputs = []
    while engine.has_work:
        outputs += engine.step()
    times = outputs[-1].times
    assert times.arrival_s == -3.0
    assert times.arrival_s < times.first_token_s == times.token_s[0] <= times.token_s[-1] <= times.finish_s
    assert list(times.token_s) == sorted(times.token_s)
    assert len(times.token_s) == 6


def test_a_stream_is_the_same_output_bit_by_bit(engine, prompt, dense):
    outputs = list(engine.stream(prompt(5), greedy()))
    assert [output.finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    assert [len(output.token_ids) for output in outputs] == sorted({len(output.token_ids) for output in outputs})
    assert outputs[-1].token_ids == dense(prompt(5), greedy())


def test_a_stream_shows_no_text_that_it_takes_back(make, dense):
    """What may be the beginning of a stop text waits until it is none."""
    engine = make(tokenizer=LetterTokenizer())
    ids = LetterTokenizer().encode("some text")
    text = LetterTokenizer().decode(dense(ids, greedy()))
    for stop in (text[6:9], text[6:8] + "?"):
        shown = [output.text for output in engine.stream("some text", greedy(stop=(stop,)))]
        assert shown[-1] == (text[:6] if stop in text else text)
        assert all(shown[-1].startswith(part) for part in shown)


def test_leaving_a_stream_aborts(engine, prompt, dense):
    stream = engine.stream(prompt(5), greedy(60))
    other = engine.add_request(prompt(9), greedy(12))
    next(stream)
    stream.close()
    done = []
    while engine.has_work:
        done += [output for output in engine.step() if output.finished]
    assert [(output.request_id, output.token_ids) for output in done] == [(other, dense(prompt(9), greedy(12)))]
    assert engine.memory.num_free_pages == 16


def test_generate_leaves_the_outputs_of_others(engine, prompt, dense):
    other = engine.add_request(prompt(9), greedy(3))
    (output,) = engine.generate([prompt(5)], greedy(30))
    assert output.token_ids == dense(prompt(5), greedy(30))
    done = [out for out in engine.step() if out.finished]
    assert [(out.request_id, out.token_ids) for out in done] == [(other, dense(prompt(9), greedy(3)))]


def test_a_failure_leaves_the_outputs_of_others(make, prompt, dense):
    """What had ended before is still handed out."""

    def hook(plan):
        if plan.step > 8:
            raise ZeroDivisionError("mine")

    engine = make(on_plan=hook, limits={"max_horizon": 1})
    other = engine.add_request(prompt(9), greedy(3))
    with pytest.raises(EngineError, match="mine"):
        engine.generate([prompt(5)], greedy(30))
    done = {output.request_id: output for output in engine.step()}
    assert done.pop(other).token_ids == dense(prompt(9), greedy(3))
    assert [output.outputs[0].finish_reason for output in done.values()] == ["error"]


def test_an_interrupt_in_a_step(make, prompt, dense):
    """It stays an interrupt, and the engine serves on."""

    def hook(plan):
        if plan.step == 4 and not raised:
            raised.append(plan)
            raise KeyboardInterrupt

    raised = []
    engine = make(on_plan=hook, limits={"max_horizon": 1})
    with pytest.raises(KeyboardInterrupt):
        list(engine.stream(prompt(5), greedy()))
    assert engine.generate([prompt(5)], greedy())[0].token_ids == dense(prompt(5), greedy())
    assert engine.memory.num_free_pages == 16


async def collect(engine, ids, params, **options):
    last = None
    async for output in engine.agenerate(ids, params, **options):
        last = output
    return last


def test_several_callers(engine, prompt, dense):
    """Nine at once over four seats; one is refused, one gives up; all others get their own tokens."""

    async def gives_up():
        async for output in engine.agenerate(prompt(6), greedy(80)):
            if len(output.token_ids) > 3:
                return output

    async def refused():
        with pytest.raises(RequestRejected, match="prompt_tokens"):
            await collect(engine, [], greedy())

    async def main():
        calls = [collect(engine, prompt(length), greedy(5 + length)) for length in range(1, 8)]
        return await asyncio.gather(*calls, gives_up(), refused())

    outputs = asyncio.run(main())
    for length, output in enumerate(outputs[:7], 1):
        assert output.finished
        assert output.token_ids == dense(prompt(length), greedy(5 + length))
    assert not outputs[7].finished
    while engine.has_work:
        engine.step()
    assert engine.memory.num_free_pages == 16
    # Another event loop, later.
    assert asyncio.run(collect(engine, prompt(5), greedy())).token_ids == dense(prompt(5), greedy())


def test_callers_leave_the_outputs_of_others(engine, prompt, dense):
    """A request that did not come through ``agenerate`` is served beside, and handed out by the next step."""
    others = [engine.add_request(prompt(9), greedy(tokens)) for tokens in (3, 40)]
    asyncio.run(collect(engine, prompt(5), greedy(12)))
    done = {}
    while engine.has_work:
        done |= {output.request_id: output.token_ids for output in engine.step() if output.finished}
    assert done == {name: dense(prompt(9), greedy(tokens)) for name, tokens in zip(others, (3, 40), strict=True)}


def test_a_cancelled_caller(engine, prompt, dense):
    async def main():
        task = asyncio.create_task(collect(engine, prompt(6), greedy(80)))
        other = asyncio.create_task(collect(engine, prompt(5), greedy()))
        await asyncio.sleep(0.01)
        task.cancel()
        output = await other
        with pytest.raises(asyncio.CancelledError):
            await task
        return output

    assert asyncio.run(main()).token_ids == dense(prompt(5), greedy())
    assert engine.memory.num_free_pages == 16


def test_a_failure_reaches_every_caller(make, prompt, dense, monkeypatch):
    engine = make()

    def fails(*args, **options):
        monkeypatch.undo()
        raise RuntimeError("out of luck")

    async def main():
        monkeypatch.setattr(engine.executor, "run", fails)
        calls = [collect(engine, prompt(length), greedy()) for length in (5, 6)]
        return await asyncio.gather(*calls, return_exceptions=True)

    assert all(isinstance(error, EngineError) for error in asyncio.run(main()))
    assert engine.generate([prompt(5)], greedy())[0].token_ids == dense(prompt(5), greedy())


def test_closed(make, prompt):
    with make() as engine:
        engine.add_request(prompt(5), greedy())
        engine.step()
    engine.close()
    for call in (engine.step, lambda: engine.add_request(prompt(5)), lambda: engine.generate([prompt(5)])):
        with pytest.raises(EngineError, match="the engine is closed; make a new one"):
            call()


def test_stats(make, prompt):
    engine = make()
    engine.generate([prompt(20), prompt(9)], greedy(10))
    stats = engine.stats
    assert (stats.prompt_tokens, stats.output_tokens) == (29, 20)
    assert 0 < stats.dispatches <= stats.steps
    assert stats.host_s > 0
    assert stats.wait_s > 0

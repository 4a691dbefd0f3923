"""The scheduling of work over workers, against its own rules (no Ray here)."""

import asyncio
import random
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from registry_load import outstanding

from async_grpo.errors import ConfigurationError, WorkerLost
from async_grpo.experience.worker_registry import WorkerRegistry, least_loaded, scheduling_policy
from async_grpo.messages import WorkerInfo


def info(worker_id: str, max_sequences: int = 8, max_tokens: int = 1000) -> WorkerInfo:
    return WorkerInfo(worker_id, "generation", max_sequences, max_tokens)


def registry_of(*workers: WorkerInfo, grace_s: float = 5.0) -> WorkerRegistry:
    registry = WorkerRegistry("generation", grace_s)
    for worker in workers:
        registry.register(worker)
        registry.activate(worker.worker_id)
    return registry


async def is_waiting(task: asyncio.Task) -> bool:
    await asyncio.sleep(0.01)
    return not task.done()


async def test_the_worker_with_the_least_outstanding_work_is_chosen():
    registry = registry_of(info("a"), info("b"))
    first = await registry.acquire(4, 10)
    second = await registry.acquire(4, 10)
    assert {first.worker_id, second.worker_id} == {"a", "b"}
    registry.release(first, 1)
    third = await registry.acquire(1, 10)  # 3 outstanding against 4
    assert third.worker_id == first.worker_id


async def test_tokens_count_as_much_as_sequences():
    registry = registry_of(info("long"), info("short"))
    long = await registry.acquire(1, 900)
    short = await registry.acquire(2, 10)
    assert short.worker_id != long.worker_id
    assert (await registry.acquire(1, 10)).worker_id == short.worker_id  # 3 sequences, but far fewer tokens


async def test_a_turn_goes_back_to_the_worker_of_the_turn_before_unless_that_is_much_fuller_or_gone():
    registry = registry_of(info("a"), info("b"))
    first = await registry.acquire(1, 10)
    again = await registry.acquire(1, 10, first.worker_id)
    third = await registry.acquire(
        1, 10, first.worker_id
    )  # 2 of 8 places are taken there, none elsewhere: 0.25
    assert again.worker_id == third.worker_id == first.worker_id
    other = await registry.acquire(1, 10, first.worker_id)
    assert other.worker_id != first.worker_id
    registry.deregister(first.worker_id, "lost")
    assert (await registry.acquire(1, 10, first.worker_id)).worker_id == other.worker_id


async def test_first_come_first_served_so_that_a_large_group_does_not_starve():
    registry = registry_of(info("a", max_sequences=4))
    lease = await registry.acquire(3, 10)
    large = asyncio.create_task(registry.acquire(4, 10))
    small = asyncio.create_task(registry.acquire(1, 10))
    assert await is_waiting(small)  # it would fit, but it came later
    registry.release(lease, 3)
    registry.release((await large), 4)
    assert (await small).sequences == 1


async def test_a_lost_worker_takes_its_leases_with_it_and_loads_never_go_negative():
    registry = registry_of(info("a"))
    lease = await registry.acquire(8, 10)
    registry.deregister("a", "died")
    registry.deregister("a", "died")  # told twice
    registry.release(lease, 8)
    assert outstanding(registry) == (0, 0)
    registry.register(info("a"))
    registry.activate("a")
    registry.release(lease, 8)  # late news of the old lease
    assert outstanding(registry) == (0, 0)


async def test_without_any_worker_the_wait_ends_and_names_the_last_one():
    registry = registry_of(info("a"), grace_s=0.5)
    registry.deregister("a", "killed by signal 9")
    with pytest.raises(WorkerLost, match="no generation worker.*killed by signal 9"):
        await asyncio.wait_for(registry.acquire(1, 10), 5)


async def test_a_worker_that_is_being_started_again_is_waited_for_beyond_the_grace():
    registry = registry_of(info("a"), grace_s=0.05)
    registry.deregister("a", "killed")
    registry.expect(0.3)
    begun = time.monotonic()
    with pytest.raises(WorkerLost, match="no generation worker for 0 s \\(last: a: killed"):
        await registry.acquire(1, 1)
    assert 0.25 < time.monotonic() - begun < 2


async def test_the_grace_begins_again_with_every_worker_that_is_lost():
    registry = WorkerRegistry("generation", grace_s=0.3)
    waiting = asyncio.create_task(registry.acquire(1, 10))
    await asyncio.sleep(0.2)
    registry.register(info("a"))  # it never works
    await asyncio.sleep(0.2)
    registry.deregister("a", "killed")
    await asyncio.sleep(0.2)
    assert not waiting.done()
    with pytest.raises(WorkerLost, match="a: killed"):
        await asyncio.wait_for(waiting, 5)


async def test_a_worker_that_registers_again_begins_anew():
    registry = registry_of(info("a", 4), info("b", 4))
    old = await registry.acquire(4, 10)
    registry.register(info("a", 4))
    registry.activate("a")
    registry.release(old)  # of what it was
    assert outstanding(registry) == (0, 0)
    assert sorted([(await registry.acquire(4, 10)).worker_id for _ in range(2)]) == ["a", "b"]


async def test_a_group_that_has_become_too_large_is_refused_while_it_waits_and_blocks_nobody():
    registry = registry_of(info("large", max_sequences=8), info("small", max_sequences=2))
    await registry.acquire(8, 10)
    waiting, behind = (asyncio.create_task(registry.acquire(n, 10)) for n in (8, 1))
    await asyncio.sleep(0)
    registry.deregister("large", "died")
    with pytest.raises(ConfigurationError, match=r"8 sequences at once .* takes 2 \(--max_num_seqs"):
        await asyncio.wait_for(waiting, 5)
    assert (await asyncio.wait_for(behind, 5)).worker_id == "small"


@pytest.mark.parametrize("served_first", [False, True])
async def test_a_caller_that_goes_away_leaves_the_line_also_just_when_it_is_served(served_first):
    registry = registry_of(info("a", max_sequences=4))
    held = await registry.acquire(4, 10)
    gone, behind = (asyncio.create_task(registry.acquire(n, 10)) for n in (4, 1))
    assert await is_waiting(gone)
    if served_first:
        registry.release(held, 4)  # there is room, and the caller has not heard of that yet
    gone.cancel()
    with pytest.raises(asyncio.CancelledError):
        await gone
    if not served_first:
        registry.release(held, 4)
    assert (await asyncio.wait_for(behind, 0.5)).sequences == 1
    assert outstanding(registry) == (1, 10)


async def test_a_policy_of_the_user_s_own_decides_who_gets_the_work(tmp_path):
    """And only among those with room: the last of a list is not the last worker."""
    (tmp_path / "own.py").write_text("def last(members, sequences, tokens):\n    return members[-1]\n")
    registry = WorkerRegistry("generation", 5.0, scheduling_policy(f"{tmp_path / 'own.py'}:last"))
    for worker in (info("a", 8), info("b", 8), info("full", 1)):
        registry.register(worker)
        registry.activate(worker.worker_id)
    assert [(await registry.acquire(2, 10)).worker_id for _ in range(5)] == [*["b"] * 4, "a"]


async def test_a_policy_that_fails_fails_its_caller_alone():
    def picky(members, sequences, tokens):
        return members[0] if sequences < 3 else 1 / 0

    registry = WorkerRegistry("generation", 5.0, picky)
    callers = [asyncio.create_task(registry.acquire(n, 10)) for n in (3, 1)]
    await asyncio.sleep(0)
    registry.register(info("a"))
    registry.activate("a")
    with pytest.raises(ZeroDivisionError):
        await callers[0]
    assert (await callers[1]).worker_id == "a"


EVENTS = st.tuples(
    st.sampled_from(["acquire", "release", "register", "deregister"]),
    st.integers(0, 5),  # which worker or lease
    st.integers(1, 6),  # sequences
    st.integers(1, 300),  # tokens
)


@settings(max_examples=200, deadline=None)
@given(st.lists(EVENTS, max_size=60))
def test_the_choice_is_that_of_looking_at_every_worker_with_room(events):
    async def scenario() -> None:
        registry, leases = registry_of(info("w0", 6, 500)), []
        for what, which, sequences, tokens in events:
            if what == "register":
                registry.register(info(f"w{which}", sequences, 10 * tokens))
                if which:  # w0 never works again
                    registry.activate(f"w{which}")
            elif what == "deregister":
                registry.deregister(f"w{which}", "died")
            elif what == "release" and leases:
                registry.release(leases[which % len(leases)], sequences)
            elif what == "acquire":
                with_room = [m for m in registry._members.values() if m.has_room(sequences)]
                if with_room:
                    expected = least_loaded(with_room, sequences, sequences * tokens)
                    leases.append(await registry.acquire(sequences, tokens))
                    assert leases[-1].member is expected
        held = {}
        for lease in leases:
            held[id(lease.member)] = held.get(id(lease.member), 0) + lease.sequences
        for member in registry._members.values():
            assert member.sequences == held.get(id(member), 0)

    asyncio.run(scenario())


@settings(max_examples=40, deadline=None)
@given(
    capacities=st.lists(st.integers(1, 6), min_size=1, max_size=3),
    requests=st.lists(st.tuples(st.integers(1, 6), st.integers(1, 50)), max_size=25),
    seed=st.integers(0, 10**6),
)
def test_whatever_comes_no_worker_is_overfilled_and_everything_is_served(capacities, requests, seed):
    async def scenario() -> None:
        draw = random.Random(seed)  # not hypothesis' own: how often it is asked depends on the event loop
        registry = registry_of(*(info(f"w{i}", capacity) for i, capacity in enumerate(capacities)))
        waiting = [asyncio.create_task(registry.acquire(s, t)) for s, t in requests if s <= max(capacities)]
        held, leases = {f"w{i}": 0 for i in range(len(capacities))}, []
        while waiting or leases:
            await asyncio.sleep(0)
            for task in [task for task in waiting if task.done()]:
                waiting.remove(task)
                leases.append(lease := task.result())
                held[lease.worker_id] += lease.sequences
                assert held[lease.worker_id] <= capacities[int(lease.worker_id[1:])]
            if leases:
                lease = draw.choice(leases)
                registry.release(lease, 1)
                held[lease.worker_id] -= 1
                if not lease.sequences:
                    leases.remove(lease)
        assert outstanding(registry) == (0, 0)

    asyncio.run(asyncio.wait_for(scenario(), 10))

"""verifiers 0.4's environments, in an interpreter of their own: `rows NAME OPTIONS SPLIT`, or `play NAME OPTIONS`, which
takes trajectories of the run's endpoint for as long as there are any.

OPTIONS: a JSON object of what `vf-eval` calls --env.* and --select.*; those in "train." or "eval." are of that split.
"""

import asyncio
import json
import os
import re
import sys
from contextlib import AsyncExitStack, suppress
from typing import Any

import httpx
import verifiers.v1 as vf
from verifiers.v1.utils.generic import deep_merge

CHAT = "verifiers_chat"  # the module beside this one


def load(name: str, options: dict[str, Any], split: str) -> tuple[Any, dict[int, Any]]:
    """The environment and its tasks. ValueError: it cannot be trained on like this."""
    of = {one: (options := dict(options)).pop(one, {}) for one in ("train", "eval")}
    if split == "eval" and not of["eval"]:
        raise ValueError("which tasks are for evaluation? Name them, as eval.taskset.split=test")
    options = deep_merge(deep_merge(options, of[split]), {"taskset": {"id": name}})
    select = vf.SelectConfig(**options.pop("select", {}))
    config = vf.resolve_env_config(options)
    roles = {role: agent for role, agent in config if isinstance(agent, vf.AgentConfig)}
    if len(roles) != 1:
        raise ValueError(f"it has the roles {', '.join(roles)}: only one can be trained")
    ((role, agent),) = roles.items()
    mine: dict[str, Any] = {"retries": vf.RetryConfig()}  # they would be turns of the same trajectory
    if agent.harness is None and vf.default_harness_id(name) == "bash":
        mine["harness"] = vf.harness_config_type(CHAT)(id=CHAT)
    if "runtime" not in agent.model_fields_set:
        mine["runtime"] = vf.SubprocessConfig()
    env = vf.load_environment(config.model_copy(update={role: agent.model_copy(update=mine)}))
    if not (taskset := env.taskset.select(select)).bounded:
        raise ValueError("its tasks have no end: say how many, as select.limit=1000")
    return env, {task.data.idx: task for task in taskset}


async def play(env: Any, tasks: dict[int, Any], key: str, row: dict[str, Any]) -> dict[str, Any]:
    """The result of one trajectory. RuntimeError: it has earned no reward."""
    base_url, variable, task = os.environ["OPENAI_BASE_URL"], f"API_KEY_{hash(key)}", tasks.get(row["task"])
    if task is None or task.hash != row["hash"]:
        raise RuntimeError("the environment makes other tasks each time it is loaded")
    os.environ[variable] = key  # verifiers gives no subprocess a variable with such a name
    try:
        client = vf.EvalClientConfig(base_url=base_url, api_key_var=variable)
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    finally:
        del os.environ[variable]
    errors = [f"{error.type}: {error.message}" for of in (episode, *episode.traces) for error in of.errors]
    if not episode.ok or len(episode.traces) != 1:
        raise RuntimeError("; ".join(errors) or f"{len(episode.traces)} rollouts: only one can be trained")
    (trace,) = episode.traces
    rewards = {name: reward and reward.score for name, reward in trace.rewards.items()}
    late = trace.is_timeout and trace.stop_condition != "agent_timeout"  # that one is scored
    if late or not rewards or None in rewards.values():
        raise RuntimeError(f"it has not been scored ({trace.stop_condition}): {rewards}")
    numbers = {plain_name(name): value for name, value in (trace.metrics | rewards).items()}
    return {"reward": trace.reward, "numbers": numbers}


def plain_name(name: str) -> str:
    """Return a name that the run's metrics take; a reward may be called `<lambda>`.

    >>> plain_name("<lambda>")
    '_lambda_'
    """
    return re.sub(r"[^\w./-]", "_", name)[:100] or "_"


async def play_all(name: str, options: dict[str, Any]) -> None:
    """Take trajectories and report them, until the endpoint closes."""
    loaded: dict[str, tuple[Any, dict[int, Any]]] = {}  # by split
    http = httpx.AsyncClient(timeout=60)
    async with AsyncExitStack() as stack, http, asyncio.TaskGroup() as group:

        async def post(path: str, key: str, body: Any = None) -> Any:
            url = f"{os.environ['OPENAI_BASE_URL']}/{path}"
            return await http.post(url, json=body, headers={"Authorization": f"Bearer {key}"})

        async def play_one(key: str, row: dict[str, Any]) -> None:
            try:
                answer = await post("result", key, await play(*loaded[row["split"]], key, row))
                if answer.status_code != 400:  # else its numbers are not finite
                    return
                failure = answer.text
            except (Exception, SystemExit) as error:
                failure = f"{type(error).__name__}: {error}"
            with suppress(httpx.HTTPError):  # nor may this end those beside it
                await post("result", key, {"failure": failure.encode(errors="replace").decode()})

        while True:
            taken = await post("trajectories", os.environ["OPENAI_API_KEY"])
            if taken.status_code == 204:  # none for now
                continue
            row = taken.raise_for_status().json()["row"]
            if row["split"] not in loaded:
                env, _ = loaded[row["split"]] = load(name, options, row["split"])
                await stack.enter_async_context(env.serving())
                env._interception = None  # or it would keep a client for each trajectory's key
            group.create_task(play_one(taken.json()["key"], row))


def main(mode: str, name: str, told: str, split: str = "") -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what an environment prints is none of these
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"  # uv, for some scorers
    options = json.loads(told)
    try:
        vf.import_taskset(name)
        if mode == "play":
            asyncio.run(play_all(name, options))
        for task in load(name, options, split)[1].values():
            row = {"input": task.data.prompt_text, "task": task.data.idx, "hash": task.hash, "split": split}
            answer = getattr(task.data, "answer", None)
            print(json.dumps(row | ({} if answer is None else {"answer": answer}), default=str), file=answers)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        hint = f": {sys.executable} -m pip install its package" if isinstance(error, ImportError) else ""
        sys.exit(f"verifiers:{name}: {reason}{hint}")


if __name__ == "__main__":
    main(*sys.argv[1:])

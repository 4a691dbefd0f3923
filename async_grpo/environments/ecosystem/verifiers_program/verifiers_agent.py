"""Runs environments of verifiers 0.4 in a separate Python interpreter.

    verifiers_agent.py rows NAME OPTIONS SPLIT     print the rows of a split
    verifiers_agent.py play NAME OPTIONS           play trajectories of the run's endpoint, until the endpoint closes

OPTIONS is a JSON object with the options that `vf-eval` calls --env.* and --select.*. Options under the keys "train"
and "eval" apply only to that split.
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

CHAT = "verifiers_chat"  # name of the module in this folder with the `ChatHarness`
# Seconds until a request fails. Must be longer than `CLAIM_WAIT_S` of the endpoint: while there is no trajectory to claim,
# a claim waits that long for one
REQUEST_TIMEOUT_S = 60.0
MAX_NAME_CHARACTERS = 100  # longest name of a metric that the endpoint accepts

Loaded = tuple[Any, dict[int, Any]]  # an environment, and its tasks by index


def load(name: str, options: dict[str, Any], split: str) -> Loaded:
    """Load the environment with the tasks of a split.

    Raises:
        ValueError: With these options, the policy cannot be trained in the environment.
    """
    split_options = {"train": options.get("train", {}), "eval": options.get("eval", {})}
    if split == "eval" and not split_options["eval"]:
        raise ValueError("which tasks are for evaluation? Name them, for example eval.taskset.split=test")
    shared_options = {key: value for key, value in options.items() if key not in split_options}
    merged = deep_merge(shared_options, split_options[split])
    merged = deep_merge(merged, {"taskset": {"id": name}})
    select = vf.SelectConfig(**merged.pop("select", {}))
    config = vf.resolve_env_config(merged)
    roles = {role: agent for role, agent in config if isinstance(agent, vf.AgentConfig)}
    if len(roles) != 1:
        names = ", ".join(roles) or "none"
        raise ValueError(f"exactly one role can be trained, but the environment has these: {names}")
    ((role, agent),) = roles.items()
    # Switch off retries, because a retry would add its turns to the same trajectory
    changes: dict[str, Any] = {"retries": vf.RetryConfig()}
    if agent.harness is None and vf.default_harness_id(name) == "bash":
        changes["harness"] = vf.harness_config_type(CHAT)(id=CHAT)
    if "runtime" not in agent.model_fields_set:
        changes["runtime"] = vf.SubprocessConfig()
    env = vf.load_environment(config.model_copy(update={role: agent.model_copy(update=changes)}))
    taskset = env.taskset.select(select)
    if not taskset.bounded:
        raise ValueError("the environment has endless tasks: limit them, for example with select.limit=1000")
    return env, {task.data.idx: task for task in taskset}


async def play(env: Any, tasks: dict[int, Any], key: str, row: dict[str, Any]) -> dict[str, Any]:
    """Play one trajectory, and return its result.

    Raises:
        RuntimeError: The task has changed, or the trajectory failed or was not scored.
    """
    task = tasks.get(row["task"])
    if task is None or task.hash != row["hash"]:
        raise RuntimeError("the environment makes different tasks each time it is loaded")
    # The name contains API_KEY, because verifiers does not pass such variables to subprocesses
    variable = f"API_KEY_{hash(key)}"
    os.environ[variable] = key
    try:
        client = vf.EvalClientConfig(base_url=os.environ["OPENAI_BASE_URL"], api_key_var=variable)
        episode = await env.run_episode(task, vf.ModelContext(model="policy", client=client))
    finally:
        del os.environ[variable]
    return result_of(episode)


def result_of(episode: Any) -> dict[str, Any]:
    """Return the reward and the numbers of an episode.

    Raises:
        RuntimeError: The episode failed, was not scored, or has more than one rollout.
    """
    if not episode.ok or len(episode.traces) != 1:
        errors = []
        for part in (episode, *episode.traces):
            errors += [f"{error.type}: {error.message}" for error in part.errors]
        raise RuntimeError("; ".join(errors) or f"{len(episode.traces)} rollouts: only one can be trained")
    (trace,) = episode.traces
    rewards = {name: reward and reward.score for name, reward in trace.rewards.items()}
    # The package `verifiers` scores a trace that stopped at its agent's time limit, but does not score one that stopped at
    # another time limit
    is_late = trace.is_timeout and trace.stop_condition != "agent_timeout"
    if is_late or not rewards or None in rewards.values():
        raise RuntimeError(f"it has not been scored ({trace.stop_condition}): {rewards}")
    numbers = {plain_name(name): value for name, value in (trace.metrics | rewards).items()}
    return {"reward": trace.reward, "numbers": numbers}


def plain_name(name: str) -> str:
    """Return a name that the run's metrics accept. A reward's own name may be invalid, such as `<lambda>`.

    >>> plain_name("<lambda>")
    '_lambda_'
    """
    return re.sub(r"[^\w./-]", "_", name)[:MAX_NAME_CHARACTERS] or "_"


async def play_all(name: str, options: dict[str, Any]) -> None:
    """Play the trajectories of the run's endpoint concurrently, until the endpoint closes."""
    loaded: dict[str, Loaded] = {}  # split -> environment and tasks
    http = httpx.AsyncClient(timeout=REQUEST_TIMEOUT_S)
    async with AsyncExitStack() as stack, http, asyncio.TaskGroup() as group:
        while True:
            claim = await post(http, "trajectories", os.environ["OPENAI_API_KEY"])
            is_none_waiting = claim.status_code == httpx.codes.NO_CONTENT
            if is_none_waiting:
                continue
            trajectory = claim.raise_for_status().json()
            row = trajectory["row"]
            split = row["split"]
            if split not in loaded:
                loaded[split] = load(name, options, split)
                env, _ = loaded[split]
                await stack.enter_async_context(env.serving())
                # Drop this object, in which verifiers would otherwise keep an HTTP client for the key of each trajectory
                env._interception = None
            group.create_task(play_and_report(http, loaded[split], trajectory["key"], row))


async def play_and_report(http: httpx.AsyncClient, loaded: Loaded, key: str, row: dict[str, Any]) -> None:
    """Play one trajectory, and report its reward or its failure."""
    env, tasks = loaded
    try:
        answer = await post(http, "result", key, await play(env, tasks, key, row))
        # The endpoint refuses a result with numbers that are not finite; then report a failure
        if answer.status_code != httpx.codes.BAD_REQUEST:
            return
        failure = answer.text
    except (Exception, SystemExit) as error:
        failure = f"{type(error).__name__}: {error}"
    # Errors are suppressed, because an error in one task would cancel all other trajectories of the task group
    with suppress(httpx.HTTPError):
        await post(http, "result", key, {"failure": failure.encode(errors="replace").decode()})


async def post(http: httpx.AsyncClient, path: str, key: str, body: Any = None) -> httpx.Response:
    """Send a request to the run's endpoint, and return the response."""
    url = f"{os.environ['OPENAI_BASE_URL']}/{path}"
    return await http.post(url, json=body, headers={"Authorization": f"Bearer {key}"})


def task_row(task: Any, split: str) -> dict[str, Any]:
    """Return a task as a row for the data set."""
    row = {"input": task.data.prompt_text, "task": task.data.idx, "hash": task.hash, "split": split}
    answer = getattr(task.data, "answer", None)
    if answer is not None:
        row["answer"] = answer
    return row


def main(mode: str, name: str, options_json: str, split: str = "") -> None:
    """Run one of the commands in this module's docstring. `mode` is "rows" or "play"."""
    # Standard output is reserved for rows. Text that environments print goes to standard error
    rows_file = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    # Some scorers run `uv`, which is installed in the folder of this interpreter
    os.environ["PATH"] = f"{os.path.dirname(sys.executable)}:{os.environ['PATH']}"
    options = json.loads(options_json)
    try:
        vf.import_taskset(name)
        if mode == "play":
            asyncio.run(play_all(name, options))
        _, tasks = load(name, options, split)
        for task in tasks.values():
            print(json.dumps(task_row(task, split), default=str), file=rows_file)
    except Exception as error:
        reason = " ".join(str(error.__cause__ or error).split())
        hint = f": {sys.executable} -m pip install its package" if isinstance(error, ImportError) else ""
        sys.exit(f"verifiers:{name}: {reason}{hint}")


if __name__ == "__main__":
    main(*sys.argv[1:])

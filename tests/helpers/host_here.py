"""`HostHere`: an `EnvironmentProcess` whose host runs in this process."""

import json
from typing import Any

from async_grpo.environments.processes import EnvironmentFailed


class HostHere:
    """The parent's side of a process, without a process.

    Attributes:
        host_class: The class of the host, which subclasses name.
        num_asked: Number of requests.
    """

    host_class: type

    def __init__(self, source: Any, name: str, options: dict[str, Any], **_: Any) -> None:
        self.num_asked = 0
        self._options = options
        self._host: Any = None

    async def start(self) -> None:
        if self._host is None:
            self._host = self.host_class(**self._options)

    async def ask(self, call: str, _: int, *arguments: Any, timeout_s: float) -> dict[str, Any]:
        await self.start()
        self.num_asked += 1
        # As the process's messages do it: tuples become lists
        request = json.loads(json.dumps({"call": call, "arguments": arguments}))
        ((answer,),) = await self._host.replies([{"sample": request}])
        if answer["status"] != "ok":
            raise EnvironmentFailed(answer["reason"])
        return answer

    async def close(self) -> None:
        pass

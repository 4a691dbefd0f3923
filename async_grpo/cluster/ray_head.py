"""`ray start` without three processes that a run on one machine does not use. They take 2.4 of its 5.5 s of CPU time.

They are the server of Ray Client, the web server of the dashboard, which `--include-dashboard=false` starts, too, and the
monitor of logs. Ray 2.60 has an option only for the monitor (`--include-log-monitor=false`). The other two are methods of a
private class, so a version of Ray without these methods starts all processes.
"""

import ray._private.node as node
import ray.scripts.scripts as scripts


def main() -> None:
    """Run the `ray` command with the arguments of this process."""
    for method in ("start_ray_client_server", "start_api_server"):
        if hasattr(node.Node, method):
            setattr(node.Node, method, lambda *_, **__: None)
    scripts.main()


if __name__ == "__main__":
    main()

"""Run `ray start` without three processes that a run on one machine does not use.

These are the server of Ray Client, the monitor of logs, and the web server of the dashboard, which `ray start` starts even
with `--include-dashboard=false`. Together they take almost half of its CPU time (docs/log.md, "A warm start"). Ray 2.60 has
an option only for the monitor (`--include-log-monitor=false`). The other two are methods of a private class, so a version
of Ray without these methods starts all processes.
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

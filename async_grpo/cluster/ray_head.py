"""Run `ray start` without three processes that a run on one machine does not use.

These are the server of Ray Client, the log monitor, and the web server of the dashboard, which `ray start` starts even
with `--include-dashboard=false`. Together they take almost half of the CPU time of `ray start` (docs/log.md, "A warm
start"). In Ray 2.60, an option can disable only the log monitor (`--include-log-monitor=false`). This module disables
the other two by replacing methods of a private class of Ray. If a version of Ray lacks these methods, both run.
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

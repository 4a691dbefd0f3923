"""Print `docs/agents.md` with its examples as they are in examples/agents, and write it with `--write`.

The code block behind a line that links to a file shows that file.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PAGE = ROOT / "docs" / "agents.md"
EXAMPLES = ROOT / "examples" / "agents"
LINKED_BLOCK = re.compile(r"(\]\(\.\./examples/agents/(\w+\.\w+)\):\n\n```\w+\n).*?(```\n)", re.DOTALL)


def page() -> str:
    """Return the whole page, as Markdown."""

    def block(match: re.Match[str]) -> str:
        code = (EXAMPLES / match[2]).read_text(encoding="utf-8")
        return match[1] + code + match[3]

    return LINKED_BLOCK.sub(block, PAGE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    if "--write" in sys.argv:
        PAGE.write_text(page(), encoding="utf-8")
    else:
        print(page(), end="")

"""Print `docs/agents.md` with the current examples of examples/agents. With `--write`, write the file.

If a line links to a file, the code block after this line shows the file.
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

"""Where the packages of the ecosystem's environments are (`scripts/setup_extras`): apart, as few users have them all."""

import os
import sys
from pathlib import Path

PACKAGES = Path(sys.prefix, "environments")


def there(package: str) -> bool:
    """Whether it is installed; in CI it must be."""
    return (PACKAGES / package).exists() or bool(os.environ.get("REQUIRE_EXTRAS"))

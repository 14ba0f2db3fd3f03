"""Where commands write tables. Light: see `pipeline.cli`."""

import os
import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

# Where output goes to a file or a pipe: room for a table with its paths.
_FILE_COLUMNS = 160


def console() -> "Console":
    """Returns standard output, as wide as the terminal where it is one."""
    from rich.console import Console

    free = sys.stdout.isatty() or "COLUMNS" in os.environ
    return Console(width=None if free else _FILE_COLUMNS)

"""`python -m compress`: runs the program."""

import os
import sys

from ._errors import CompressError
from ._process import find_program


def main() -> None:
    """Replaces this process with the program."""
    try:
        program = find_program()
        os.execv(program, [program, *sys.argv[1:]])
    except (CompressError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

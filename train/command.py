"""What the commands of `train` share."""

import logging
import sys
from collections.abc import Callable

USER_ERRORS = (ValueError, TypeError, OSError, RuntimeError, ImportError)


def run(work: Callable[[], None]) -> int:
    """Runs a command's work: its exit status, a user's error in one line on stderr.

    Args:
        work: the command, its flags bound.

    Returns:
        0, 2 after a user's error, 130 after Ctrl-C.
    """
    logging.basicConfig(format="%(levelname)s: %(message)s")
    try:
        work()
    except USER_ERRORS as error:
        print("error:", " ".join(str(error).split()), file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return 0

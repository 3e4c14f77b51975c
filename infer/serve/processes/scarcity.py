"""Recognises that a process ended because a limit on memory or threads was too low."""

import re
import resource

# Matches what libraries print when a limit on memory or threads ends them.
SCARCE = re.compile(
    r"[Mm]emory|bad_alloc|\balloc|failed to map|pthread|new thread|Resource temporarily|RESOURCE_EXHAUSTED|mmap"
)


def is_scarcity(found: str | BaseException) -> bool:
    """Whether what a process printed, or an exception or one of its causes, shows a lack of memory or threads."""
    if isinstance(found, str):
        return SCARCE.search(found) is not None
    cause = found.__cause__ or found.__context__
    return isinstance(found, MemoryError) or is_scarcity(str(found)) or (cause is not None and is_scarcity(cause))


def scarce(how: str) -> str:
    """The line for a process that lacked memory or threads. how: how it ended."""
    limit = resource.getrlimit(resource.RLIMIT_AS)[0]
    limited = "" if limit == resource.RLIM_INFINITY else f" of {limit >> 10:,} KiB (ulimit -v)"
    return (
        f"the engine process ran out of memory or threads ({how}): raise the limit{limited}, or use a smaller model or"
        " fewer --threads"
    )

"""Which release of TensorHub runs here: the version of the installed distribution."""

from functools import cache
from importlib.metadata import PackageNotFoundError, version


@cache
def release() -> str:
    """Return the version, or what says that none is installed."""
    try:
        return version("tensorhub")
    except PackageNotFoundError:
        return "0+unknown"

"""Which release of TensorHub runs here: the version of the installed distribution."""

from functools import cache


@cache
def release() -> str:
    """Return the version, or what says that none is installed."""
    from importlib.metadata import PackageNotFoundError, version  # noqa: PLC0415 (a tenth of what the SDK takes to import)

    try:
        return version("tensorhub")
    except PackageNotFoundError:
        return "0+unknown"

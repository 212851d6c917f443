"""`tensorhub-runner`, which is also `python -m tensorhub_runner`."""

from tensorhub_common.runtime.extras import run_main


def main() -> None:
    """Run the program, or say which extra is missing."""
    run_main("tensorhub_runner.app.main", "tensorhub-runner", "runner")


if __name__ == "__main__":
    main()

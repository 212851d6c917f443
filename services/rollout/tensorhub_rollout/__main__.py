"""`tensorhub-rollout`, which is also `python -m tensorhub_rollout`."""

from tensorhub_common.runtime.extras import run_main


def main() -> None:
    """Run the program, or say which extra is missing."""
    run_main("tensorhub_rollout.app.main", "tensorhub-rollout", "server")


if __name__ == "__main__":
    main()

"""`tensorhub-agent`, which is also `python -m tensorhub_agent`."""

from tensorhub_common.runtime.extras import run_main


def main() -> None:
    """Run the program, or say which extra is missing."""
    run_main("tensorhub_agent.app.main", "tensorhub-agent", "agent")


if __name__ == "__main__":
    main()

"""`python -m tensorhub_agent`."""

from tensorhub_agent.main import main

main()

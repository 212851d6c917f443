"""`python -m tensorhub_launcher …` is `tensorhub …`."""

from tensorhub_launcher import main

main()

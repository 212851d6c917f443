"""What spans cost: the processor time of those who worked, not of those who waited."""

import threading
import time
from contextlib import suppress

from tensorhub_common.observability.span_cost import CpuAccount


def work(seconds: float) -> None:
    until = time.thread_time() + seconds
    while time.thread_time() < until:
        pass


def test_processor_time_counts_and_waiting_does_not() -> None:
    account = CpuAccount()
    with account.counted():
        threading.Event().wait(0.05)
    assert account.spent_s < 0.04
    with account.counted():
        work(0.05)
    assert account.spent_s >= 0.05


def test_threads_are_summed_and_who_fails_counts() -> None:
    account = CpuAccount()

    def part() -> None:
        with suppress(ZeroDivisionError), account.counted():
            work(0.02)
            _ = 1 / 0

    threads = [threading.Thread(target=part) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert account.spent_s >= 0.06

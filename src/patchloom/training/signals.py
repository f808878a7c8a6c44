"""Signals that end a run: the loop notes them, finishes the current batch and saves."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

_SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)


@contextmanager
def noted_signals(note: Callable[[str], None]) -> Iterator[None]:
    """Call `note` with the name of a signal that would end the process, such as "SIGTERM".

    Outside the main thread, where Python cannot set handlers, signals keep their effect.
    """
    caught = list(_SIGNALS) if threading.current_thread() is threading.main_thread() else []
    if signal.getsignal(signal.SIGHUP) is signal.SIG_IGN and caught:  # under nohup
        caught.remove(signal.SIGHUP)
    previous = {which: signal.signal(which, lambda number, _: note(signal.Signals(number).name)) for which in caught}
    try:
        yield
    finally:
        for which, handler in previous.items():
            signal.signal(which, handler)

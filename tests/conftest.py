"""For all tests."""

from __future__ import annotations

import signal

if signal.getsignal(signal.SIGINT) == signal.SIG_IGN:
    # As a shell starts what runs in the background, and with it whatever a test starts and interrupts.
    signal.signal(signal.SIGINT, signal.default_int_handler)

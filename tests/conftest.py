"""For all tests."""

from __future__ import annotations

import signal

# As a shell starts what runs in the background, or nohup: whatever a test starts and interrupts would ignore it, too.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

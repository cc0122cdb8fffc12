"""For all tests."""

from __future__ import annotations

import signal

from hypothesis import settings

# As a shell starts what runs in the background, or nohup: whatever a test starts and interrupts would ignore it, too.
for number, usual in (
    (signal.SIGINT, signal.default_int_handler),
    (signal.SIGHUP, signal.SIG_DFL),
    (signal.SIGTERM, signal.SIG_DFL),
):
    if signal.getsignal(number) == signal.SIG_IGN:
        signal.signal(number, usual)

# Beside other tests, or on a machine that is lent in turns, a call of microseconds may take a second.
settings.register_profile("beside others", settings.default, deadline=None)
settings.load_profile("beside others")

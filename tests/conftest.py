import signal

import pytest

# Started in the background of a shell, this process and every child would ignore SIGINT; the tests of Ctrl-C need it.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN: signal.signal(signal.SIGINT, signal.default_int_handler)

def pytest_configure(config): config.addinivalue_line('markers', 'soak: long fault, fuzz and endpoint runs (make soak)')

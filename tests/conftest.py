import pytest

def pytest_configure(config): config.addinivalue_line('markers', 'soak: long fault, fuzz and endpoint runs (make soak)')

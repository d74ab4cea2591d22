"""Checks that training holds what is promised: parity, verify, replay and chaos as a library."""

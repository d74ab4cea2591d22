"""Processes and ranks: start and exit, launch checks, collectives, sharding, hangs and failed peers.

Import from its modules: those for sharding take a second to import, and not every process needs them.
"""

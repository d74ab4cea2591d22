"""A process from start to end: rendezvous, launch checks, signals, hangs, failed peers, memory, jobs."""

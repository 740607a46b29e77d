"""Kernels with deliberate faults, and the calls that tests/test_gluon_sim.py makes of them in a `Worker`."""

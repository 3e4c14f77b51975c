"""Eight host devices for the whole test run, asked for before anything touches JAX, and the same hypothesis examples every time."""

import signal

import hypothesis

import laneformer

laneformer.use_host_devices(8)

signal.signal(signal.SIGINT, signal.default_int_handler)  # also where the tests run as a background job, which ignores Ctrl-C

hypothesis.settings.register_profile("laneformer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("laneformer")

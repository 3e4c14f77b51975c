"""Eight host devices for the whole test run, asked for before anything touches JAX, and the same hypothesis examples every time."""

import hypothesis

import laneformer

laneformer.use_host_devices(8)

hypothesis.settings.register_profile("laneformer", derandomize=True, deadline=None)
hypothesis.settings.load_profile("laneformer")

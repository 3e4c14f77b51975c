"""Eight host devices for the whole test run, asked for before anything touches JAX."""

import laneformer

laneformer.use_host_devices(8)
